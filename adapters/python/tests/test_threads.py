"""Threads: the same bits on any number of them, other threads of Python meanwhile, and forked processes."""

import concurrent.futures
import contextlib
import os
import threading
import time
import unittest

import numpy as np
import sdpa
from case import TestCase
from oracle import qkv


class Threads(TestCase):
    def test_bits_do_not_depend_on_threads_or_instruction_sets(self):
        for rows, keys in [(200, 700), (1, 5000)]:
            arrays = qkv(rows=rows, keys=keys, dim=64, value_dim=64)
            call = lambda **options: sdpa.scaled_dot_product_attention(*arrays, **options)
            expected = call(threads=1)
            for threads in [None, 2, 3, 1000, 2**62]:
                self.assert_bits(call(threads=threads), expected, f"{threads} threads")
            for isa in set(sdpa.instruction_sets()) - {"portable"}:  # Which may lack fused products.
                self.assert_bits(call(isa=isa), expected, isa)
            np.testing.assert_allclose(call(isa="portable"), expected, atol=1e-5)

    def test_calls_of_several_threads_at_once(self):
        arrays = qkv(rows=100, keys=300)
        expected = sdpa.scaled_dot_product_attention(*arrays)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for got in pool.map(lambda _: sdpa.scaled_dot_product_attention(*arrays), range(40)):
                self.assert_bits(got, expected)

    def long_call(self, **options):
        """A call of about a second on one thread, in another thread of Python. Returns the thread when it is in the call."""
        arrays = qkv(batch=1, heads=1, kv_heads=1, rows=20_000, keys=20_000, dim=64, value_dim=64)
        begun = threading.Event()

        def run():
            begun.set()
            while True:  # Refused while the test itself writes the output.
                with contextlib.suppress(ValueError):
                    return sdpa.scaled_dot_product_attention(*arrays, threads=1, **options)

        thread = threading.Thread(target=run)
        thread.start()
        begun.wait()
        return thread

    def test_the_interpreter_goes_on_meanwhile(self):
        thread, steps = self.long_call(), 0
        while thread.is_alive():
            steps += 1
            time.sleep(0.001)
        thread.join()
        # With the lock held, no step but the first would be made before the call ends.
        self.assertGreater(steps, 10)

    def test_an_output_is_written_by_one_call_at_a_time(self):
        out = np.zeros((1, 1, 20_000, 64), np.float32)
        thread = self.long_call(out=out)
        x = qkv(batch=1, heads=1, kv_heads=1, rows=20_000, keys=1, dim=64, value_dim=64)
        try:
            with self.assertRaisesRegex(ValueError, "^out: the array is being read or written") as _:
                while thread.is_alive():
                    sdpa.scaled_dot_product_attention(*x, out=out)
            self.refuses(ValueError, "query: another call is writing this array", sdpa.explain, out, *x[1:])
        finally:
            thread.join()
        sdpa.scaled_dot_product_attention(*x, out=out)

    @unittest.skipUnless(hasattr(os, "fork"), "no fork on this system")
    def test_calls_in_a_forked_process(self):
        arrays = qkv(batch=4, rows=200, keys=700, dim=64, value_dim=64)
        expected = sdpa.scaled_dot_product_attention(*arrays)  # On the pool, whose threads a fork does not have.
        child = os.fork()
        if child == 0:
            same = all(
                sdpa.scaled_dot_product_attention(*arrays, threads=threads).tobytes() == expected.tobytes()
                for threads in (None, 2)
            )
            os._exit(0 if same else 1)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                self.assertEqual(status, 0)
                return
            time.sleep(0.01)
        os.kill(child, 9)
        os.waitpid(child, 0)
        self.fail("the forked process waits for threads that it does not have")


if __name__ == "__main__":
    unittest.main()
