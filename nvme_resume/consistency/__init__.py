"""Does a resumed run continue the run that was stopped?  ``nvme-resume check`` answers with numbers.

The same small training is run three times in fresh processes: (a) without a stop, (b) stopped, saved and
resumed by nvme_resume, (c) the same by plain DeepSpeed.  Losses are compared bit by bit, and digests of the
whole training state say what differs when something does.

``factory`` is the protocol for models of your own; ``worker`` is the process of one rank (the only module
here that knows DeepSpeed); everything else runs in the driver.
"""
