"""Random calls of every operator of torch.ops.qsim: an error or a right answer, nothing else.

`scene.py` draws arguments that fit, `spoil.py` makes them odd, `outcome.py` judges what comes back, `__main__.py` runs many of them.
"""
