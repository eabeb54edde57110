"""Planted causes: one small training loop for each thing that stalls a training, and healthy loops
beside them.
"""
