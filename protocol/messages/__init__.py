"""Every message of a request's life that crosses a socket of Tandem, in its order.

    router ──Reserve──► decode        Reserved | Failed(overloaded)
    router ──Prefill──► prefill       FirstToken | Failed
    prefill ─PairOpen─► decode        PairOpened | Failed                 once per pair and epoch
    prefill ─PushAnnounce─► decode    PushPosted                          once per prefill step, before its KV is sent
    prefill ─PushCommit─► decode      Committed | Failed                  closes the transfer; TransferAbort gives it up
    router ──Attach──► decode         Attached | Failed                   waits for the commit if it must; or prefills there
    decode ──TokenFrame──► router     one per router and step
    decode ──PairClosed─► prefill     when decode's end of their channel has died
    router ──Release──► decode        idempotent, no answer;  Cancel likewise to prefill
    router ──Migrate──► decode        Migrated | Failed                   while the stream runs; KV goes as from prefill

A message with a `call_id` is a question; its answer carries the same `call_id`. Lengths are in tokens, times in seconds.
"""
