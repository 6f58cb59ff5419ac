"""Who an E2B client is: an API key is a token of the fleet, a sandbox's key is made from its id.

Fronts keep nothing: they all derive a sandbox's key from the secret that they share with the nodes, so one
front takes what another gave out. It names the token for which it was made, and is of no use once that is
taken away.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

from sandbox.e2b.status import UNAUTHENTICATED, E2BError
from sandbox.tokens import Access, Principal


class Keys:
    """Makes and checks the keys of sandboxes."""

    def __init__(self, access: Access, secret: str):
        self._access = access
        self._secret = hashlib.sha256(b"e2b sandbox keys\0" + secret.encode()).digest()

    def caller(self, api_key: str) -> Principal:
        """Returns who has an API key.

        Raises:
            E2BError: Nobody.
        """
        who = self._access.principal(f"Bearer {api_key}")
        if who is None:
            raise E2BError(UNAUTHENTICATED, "this needs an API key (X-API-Key) that is a token of this fleet")
        return who

    def make(self, who: Principal, box: str) -> str:
        """Returns the key with which a principal's clients reach a sandbox."""
        name = base64.urlsafe_b64encode(f"{who.name}\n{who.project}".encode()).decode().rstrip("=")
        return f"{name}.{self._sign(name, box)}"

    def holder(self, key: str, box: str) -> Principal:
        """Returns for whom a sandbox's key was made.

        Raises:
            E2BError: It was not made for this sandbox, or its principal is not known any more.
        """
        name, _, signature = key.partition(".")
        good = hmac.compare_digest(self._sign(name, box).encode(), signature.encode(errors="replace"))
        try:
            who = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode().split("\n") if good else []
        except (binascii.Error, ValueError):
            who = []
        for _, principal in self._access.principals:
            if [principal.name, principal.project] == who:
                return principal
        raise E2BError(UNAUTHENTICATED, "this needs the access token (X-Access-Token) of the sandbox")

    def _sign(self, name: str, box: str) -> str:
        return hmac.new(self._secret, f"{name}\n{box}".encode(errors="replace"), hashlib.sha256).hexdigest()
