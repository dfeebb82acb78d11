"""How a model is spread: one file a technique, and parallelize.py, which states the order. Addresses modules by
path.
"""
