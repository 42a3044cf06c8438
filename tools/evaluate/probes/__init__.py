"""What a simple reader makes of a model's features: neighbours, least squares, linear heads.

`features` asks the model once about every image, `neighbours`, `fewshot` and `linear` are readers.
"""
