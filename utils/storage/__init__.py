"""Folders on a local disk or behind an fsspec URL, and how something whole appears in them.

`places` opens what a person writes, `local` and `remote` are the two kinds of `folder`, `retry`
makes calls to a store again.
"""
