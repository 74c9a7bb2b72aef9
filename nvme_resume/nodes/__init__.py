"""Nodes with disks of their own: what they bring each other, and over what.

One process of each node, the publisher of its save folder, sends and receives; over gloo, with a group for each pair
that exchanges something, so that neither the training's collectives nor another pair is ever waited for.
"""
