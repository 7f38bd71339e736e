"""Quality and cost of the forecasts of calls."""
