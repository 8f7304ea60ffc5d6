"""Linux machines over SSH, and the Android devices behind them."""
