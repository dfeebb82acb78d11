"""Ablations: which experiment. One declared variable, several seeds, loss beside throughput. Imports no torch.

``python -m ablation`` lists the commands. question.py reads a question's TOML file, guard.py refuses it unless its
arms differ in what it declares, plan.py turns it into runs, runner.py executes them; what follows reads run directories
only.
"""
