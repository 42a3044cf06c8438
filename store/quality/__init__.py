"""Gates, reports, trends, costs and the validation of runs."""
