"""The run store: one directory for each run, on a disk or a bucket. No torch, no TensorFlow.

`runs` makes and finds them, `lock` and `claim` keep other programs out, `attempts` and `history`
hold what happened, `catalogue` tells what each metric is, `mirror` and `artifacts` carry it to a
bucket, `changes` tells what may differ when a run goes on.
"""
