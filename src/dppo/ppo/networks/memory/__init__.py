"""Networks with a GRU or an LSTM, in NumPy and in torch."""
