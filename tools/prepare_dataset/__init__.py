"""Makes datasets that runs read: one file a kind of source, each with its subcommand."""
