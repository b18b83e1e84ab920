"""Networks with a GRU or an LSTM, in torch."""
