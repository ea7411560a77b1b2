"""Tenants come from credentials, and from nothing else."""

from __future__ import annotations

import pytest

from libs.service.tenant import SHARED, tenant_of, tenant_of_key


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic abc"},
        {"x-api-key": " "},
        {"x-tenant": "a", "cache_salt": "b"},
    ],
)
def test_no_credential_is_the_shared_tenant(headers: dict[str, str]) -> None:
    assert tenant_of(headers) == SHARED


def test_the_same_key_is_the_same_tenant_however_it_is_sent() -> None:
    assert tenant_of({"Authorization": "Bearer k1"}) == tenant_of({"x-api-key": "k1"}) == tenant_of_key("k1")
    assert tenant_of({"Authorization": "bearer  k1 "}) == tenant_of_key("k1")


def test_other_keys_are_other_tenants_and_no_key_can_name_one() -> None:
    tenants = {tenant_of_key(key) for key in ("", "a", "b", SHARED, tenant_of_key("a"))}
    assert len(tenants) == 5
    assert "secret" not in tenant_of_key("secret")
