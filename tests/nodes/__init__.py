"""Nodes with disks of their own: gather, scatter, copies on other nodes."""
