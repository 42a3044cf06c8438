"""What distillation gives on the digits: the rows of the table, and the runs behind them."""
