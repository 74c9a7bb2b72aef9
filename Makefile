# One word for each thing people and CI do here; the work is in scripts/.
# Every target sets itself up first and may be repeated.
export NVME_RESUME_VENV ?= $(CURDIR)/.venv
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.ops
RUN = scripts/run
FAST = not matrix and not torture and not huggingface

.PHONY: help setup check test test-matrix test-hf torture lint sanitize bench clean

help:
	@echo "make check        install, then compare an uninterrupted run with a resumed one (and plain DeepSpeed)"
	@echo "make test         install, then lint, types, import contract, all fast tests"
	@echo "make test-matrix  all pairs of settings, file systems, random sequences (about 40 minutes on two cores)"
	@echo "make test-hf      Trainers again and again, with an old version of transformers as well (about 40 minutes)"
	@echo "make torture      kill -9 at 2,000 points of saves, loads and prunes, power cuts, many saves (about an hour on two cores)"
	@echo "make lint         lint, formats, types, import contract"
	@echo "make sanitize     the native copier under ASan, UBSan and TSan"
	@echo "make bench        saves, loads and copies beside plain DeepSpeed, fio, cp, rsync (under 10 minutes)"
	@echo "make clean        remove .venv, built ops and build leftovers"

setup:
	@scripts/setup

check: setup
	@$(RUN) nvme-resume check --compare-stock

test: setup
	@$(RUN) scripts/lint
	@$(RUN) python -m pytest -n 2 --dist loadscope -m "$(FAST) and not alone"
	@$(RUN) python -m pytest -m "$(FAST) and alone"

test-matrix: setup
	@$(RUN) python -m pytest -m matrix

test-hf: setup
	@NVME_RESUME_OLD_TRANSFORMERS=$$(scripts/old_transformers) $(RUN) python -m pytest -m huggingface

torture: setup
	@$(RUN) python -m pytest -m torture
	@$(RUN) python -m tests.torture.run --points 2000 --out torture.json

lint: setup
	@$(RUN) scripts/lint

sanitize: setup
	@$(RUN) csrc/sanitize.sh

bench: setup
	@$(RUN) python -m benchmarks.run

clean:
	rm -rf .venv .ops build *.egg-info nvme_resume/*.so check-* torture.json
