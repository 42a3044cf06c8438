"""The content of pages as plain values: a view is made of records, and a template lays it out.

`frame` surrounds all pages, `jinja` has the filters of templates, `figures` draws curves without a
script, the others are named after their pages.
"""
