"""Keeps the buckets in Redis (`http.redis_url`), so that several clusters share their keys' limits, which outlive a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from redis.asyncio import Redis

from router.access.rates import Charge

_TAKE = """
-- KEYS: buckets. ARGV: per_minute and amount of each. As Buckets.take in router/access/rates.py, by Redis' own clock.
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local levels, wait = {}, 0
for i, key in ipairs(KEYS) do
  local per_minute, amount = tonumber(ARGV[2 * i - 1]), tonumber(ARGV[2 * i])
  local filled = redis.call('HMGET', key, 'level', 'since')
  local level = per_minute
  if filled[1] then
    if now < tonumber(filled[2]) then  -- the clock was set back: what is missing flows in from now on, also after a refusal
      filled[2] = string.format('%.6f', now)
      redis.call('HSET', key, 'since', filled[2])
      redis.call('EXPIRE', key, 61)
    end
    level = math.min(per_minute, filled[1] + math.max(0, now - filled[2]) * per_minute / 60)
  end
  levels[i] = math.min(per_minute, level - amount)
  wait = math.max(wait, (amount - level) * 60 / per_minute)
end
if wait > 0 then return tostring(wait) end
for i, key in ipairs(KEYS) do
  redis.call('HSET', key, 'level', string.format('%.9f', levels[i]), 'since', string.format('%.6f', now))
  redis.call('EXPIRE', key, 61)  -- by then it is full, as one that is not there
end
return '0'
"""
_PREFIX = "tandem:rates:"


class RedisRates:
    """A router.access.rates.RateStore over Redis. Make and close it in the event loop that uses it."""

    def __init__(self, url: str) -> None:
        """Redis has as much time as whoever waits for `take` gives it: the client's own timeouts count time of being held."""
        self._redis = Redis.from_url(url, socket_timeout=None, socket_connect_timeout=None)
        self._take = self._redis.register_script(_TAKE)

    async def take(self, charges: Sequence[Charge]) -> float:
        """Take all charges and return 0, or none of them and return the seconds until all of them could be taken."""
        buckets = [f"{_PREFIX}{charge.bucket}" for charge in charges]
        numbers = [number for charge in charges for number in (charge.per_minute, charge.amount)]
        return float(await self._take(keys=buckets, args=numbers))

    async def close(self) -> None:
        """Close the connection to Redis."""
        await self._redis.aclose()
