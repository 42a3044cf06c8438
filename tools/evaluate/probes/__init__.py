"""What a simple reader makes of a model's features: neighbours, least squares, linear heads.

`features` asks the model once about every image, `linear` is a reader beside those of
`tasks.evaluation`, `neighbours` and `fewshot`, which runs ask, too.
"""
