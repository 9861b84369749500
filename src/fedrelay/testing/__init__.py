"""The contract that every algorithm, method and federation must keep, ours or a user's."""

from fedrelay.testing.contract import check_algorithm, check_method, contract
from fedrelay.testing.hostile import HostileFederation, alike
from fedrelay.testing.promises import ContractError

__all__ = ["ContractError", "HostileFederation", "alike", "check_algorithm", "check_method", "contract"]
