"""Federated learning on clients whose data do not look alike: let a model travel before it is averaged."""
