"""The run index: what all runs of a store say, in a database that may be deleted at any time.

`scan` finds the runs and reads them, `tables` says how they lie in the database, `writer` puts
them there, `database` keeps it in step with the store and answers. SQLAlchemy is imported here
alone, so that no trainer ever loads it.
"""
