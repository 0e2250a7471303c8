"""A router's side of the contract on NATS, as short as it can be. Needs Python 3.9 and nats-py 2.14.

    python3 router.py nats://127.0.0.1:4222 my-router

It says on standard output, one JSON object a line, which workers there are and what it was told. What
your router does with its streams belongs into `move`. The steps are those of docs/writing-a-router.md.
"""

import asyncio
import json
import sys

import nats
from nats.js.errors import NotFoundError

LEASE_TTL = 15  # seconds


class Router:
    def __init__(self, client, name):
        self.client, self.js, self.name = client, client.jetstream(), name
        self.workers = {}  # key -> record
        self.gone = {}  # (node, worker, incarnation) -> highest epoch that is over; bound this in earnest

    def say(self, what, **fields):
        print(json.dumps({"what": what, **fields}), flush=True)

    # Step 1: a leased key, so that daemons know whose answers to wait for.
    async def hold_lease(self):
        value = json.dumps({"schema": 1, "router": self.name, "version": "example"}).encode()
        while True:
            # put() of a KV client drops the TTL; a message with the header keeps it.
            await self.js.publish(f"$KV.lastgasp_routers.{token(self.name)}", value, headers={"Nats-TTL": str(LEASE_TTL)})
            await asyncio.sleep(LEASE_TTL / 3)

    # Step 2: the workers. One watch, in a task of its own: what is there, then what changes.
    async def follow_workers(self):
        bucket = await self.bucket("lastgasp_workers")
        async for entry in await bucket.watchall():
            if entry is None:
                self.say("listed", count=len(self.workers))
            elif entry.operation == "PURGE" or not entry.value and entry.operation is None:
                # It expired, so it is unknown rather than withdrawn: no new work, its streams stay.
                self.workers.pop(entry.key, None)
            elif entry.operation == "DEL":
                old = self.workers.pop(entry.key, None)
                if old:  # a deletion says what a signal says, and reliably
                    self.is_over(old["node"], old["worker"], old["incarnation"], old.get("epoch", 0))
                    await self.move(entry.key, "lost", "deleted")
            else:
                await self.put(entry.key, json.loads(entry.value))

    async def put(self, key, record):
        if record.get("schema") != 1:
            return self.say("refused", key=key)
        old, epoch = self.workers.get(key), record.get("epoch", 0)
        identity = (record["node"], record["worker"], record["incarnation"])
        if self.gone.get(identity, -1) >= epoch:
            return  # a signal about this listing was faster than its record
        if old and (old["incarnation"], old.get("epoch", 0)) != (record["incarnation"], epoch):
            await self.move(key, "lost", "superseded")  # its tombstone was never seen
        self.workers[key] = record
        self.say("worker", key=key, state=record.get("state", "serving"), endpoint=record["endpoint"])

    def choose(self, model):
        fit = [r for r in self.workers.values() if r.get("state", "serving") == "serving" and model in r["models"]]
        return fit[0] if fit else None

    # Step 3: signals. Answer `received` at once, act, answer `done`.
    async def on_signal(self, message):
        signal = json.loads(message.data)
        node = signal.get("node", "")
        if signal.get("schema") != 1 or message.subject != f"lastgasp.v1.migrate.{token(node)}":
            return self.say("refused", subject=message.subject)
        await self.answer(message, signal, "received")
        counts = {"streams": 0, "moved": 0, "unmovable": 0, "failed": 0}
        for named in signal["workers"]:
            worker, incarnation, epoch = named["worker"], named["incarnation"], named.get("epoch", 0)
            key = f"{token(node)}.{token(worker)}"
            record = self.workers.get(key)
            known = record and (record["incarnation"], record.get("epoch", 0)) == (incarnation, epoch)
            if signal["action"] == "drain":
                if known:
                    record["state"] = "draining"
                continue
            self.is_over(node, worker, incarnation, epoch)  # remembered even if its record is yet to come
            if known:
                del self.workers[key]
                for name, count in (await self.move(key, signal["mode"], "signal")).items():
                    counts[name] += count
        await self.answer(message, signal, "done", **counts)

    def is_over(self, node, worker, incarnation, epoch):
        identity = (node, worker, incarnation)
        self.gone[identity] = max(epoch, self.gone.get(identity, -1))

    async def answer(self, message, signal, phase, **counts):
        if message.reply:
            body = {"schema": 1, "router": self.name, "certificate": signal["certificate"], "phase": phase, **counts}
            await self.client.publish(message.reply, json.dumps(body).encode())

    # Step 4, yours: continue the streams of this worker elsewhere. With mode "handover" what cannot be
    # moved stays; with "lost" it ends with an error that the client sees.
    async def move(self, key, mode, why):
        self.say("move", key=key, mode=mode, why=why)
        return {"streams": 0, "moved": 0, "unmovable": 0, "failed": 0}

    async def bucket(self, name):
        while True:
            try:
                return await self.js.key_value(name)
            except NotFoundError:  # no daemon was there yet
                await asyncio.sleep(0.2)

    async def run(self):
        await self.bucket("lastgasp_routers")
        await self.client.subscribe("lastgasp.v1.migrate.*", cb=self.on_signal)
        await asyncio.gather(self.hold_lease(), self.follow_workers())


def token(name):
    plain = lambda byte: chr(byte) if chr(byte).isalnum() and byte < 128 or byte in b"_-" else f"={byte:02X}"
    return "".join(map(plain, name.encode()))


async def main(url, name):
    await Router(await nats.connect(url), name).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
