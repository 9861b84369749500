"""The contract that every algorithm, method and federation must keep, ours or a user's."""
