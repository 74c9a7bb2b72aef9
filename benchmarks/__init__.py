"""Measurements of nvme_resume beside what it replaces.  Programs, not tests: ``make bench``."""
