"""Random streams of training: ``default_rng([seed, STREAM])`` gives each use of the seed its own random numbers.

A changed number changes fitted ensembles.
"""

FOLDS = 1
JOINT = 2
POLICY_LEVEL = 3
BOOTSTRAP = 4
MIXTURE = 5
HIDDEN_LAYER = 6
FINETUNE = 7
