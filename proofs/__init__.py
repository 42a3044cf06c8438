"""Programs that prove a claim about this project to those who change it."""
