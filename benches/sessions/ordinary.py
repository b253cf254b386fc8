"""Does what ordinary programs do, and prints how much processor time and how much time each
took.
"""


def _measure():
    import json
    import os
    import resource
    import shutil
    import socket
    import subprocess
    import sys
    import tempfile
    import threading
    import time

    import numpy

    # In memory on both sides.
    folder = tempfile.mkdtemp(dir="/dev/shm")
    file = os.path.join(folder, "file")
    with open(file, "w") as opened:
        opened.write("text\n" * 100)

    def loop():
        total = 0
        for number in range(1_500_000):
            total += number & 3
        return total

    def sort():
        sorted((number * 7919) % 1_000_003 for number in range(150_000))

    def matrices():
        # Too small for threads: what several get is a matter of limits.
        square = numpy.ones((40, 40))
        for _ in range(5_000):
            square @ square

    def open_and_close():
        for _ in range(12_000):
            os.close(os.open(file, os.O_RDONLY))

    def open_and_read():
        for _ in range(4_000):
            with open(file) as opened:
                opened.read()

    def open_deep():
        path = json.__file__
        for _ in range(8_000):
            os.close(os.open(path, os.O_RDONLY))

    def status():
        for _ in range(30_000):
            os.stat(file)

    def small_files():
        for number in range(1_000):
            with open(f"{folder}/{number}", "wb") as opened:
                opened.write(b"x" * 100)
        for number in range(1_000):
            with open(f"{folder}/{number}", "rb") as opened:
                opened.read()
        for number in range(1_000):
            os.unlink(f"{folder}/{number}")

    def large_file():
        block = b"x" * (1 << 20)
        with open(f"{folder}/large", "wb") as opened:
            for _ in range(32):
                opened.write(block)
        with open(f"{folder}/large", "rb") as opened:
            while opened.read(1 << 20):
                pass
        os.unlink(f"{folder}/large")

    def fresh_memory():
        for _ in range(5):
            numpy.ones(5_000_000)

    def stream():
        server = socket.create_server(("127.0.0.1", 0))
        block = bytes(1 << 16)

        def send():
            with socket.create_connection(server.getsockname()) as client:
                for _ in range(1_500):
                    client.sendall(block)

        sender = threading.Thread(target=send)
        sender.start()
        connection, _ = server.accept()
        buffer = bytearray(1 << 16)
        while connection.recv_into(buffer):
            pass
        sender.join()
        connection.close()
        server.close()

    def requests():
        server = socket.create_server(("127.0.0.1", 0))

        def answer():
            connection, _ = server.accept()
            while received := connection.recv(64):
                connection.sendall(received)
            connection.close()

        answering = threading.Thread(target=answer)
        answering.start()
        with socket.create_connection(server.getsockname()) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(2_000):
                client.sendall(b"x")
                client.recv(64)
        answering.join()
        server.close()

    def connections():
        server = socket.create_server(("127.0.0.1", 0), backlog=64)
        for _ in range(400):
            client = socket.create_connection(server.getsockname())
            connection, _ = server.accept()
            client.close()
            connection.close()
        server.close()

    def programs():
        for _ in range(40):
            subprocess.run(["/usr/bin/true"])

    def shells():
        for _ in range(15):
            subprocess.run("/usr/bin/true; /usr/bin/true", shell=True)

    def interpreters():
        for _ in range(3):
            subprocess.run([sys.executable, "-S", "-E", "-c", "import json"])

    def used():
        kinds = [
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        return sum(kind.ru_utime + kind.ru_stime for kind in kinds)

    # Threads that numpy has started spin for a while.
    time.sleep(0.2)
    figures = {}
    try:
        for task in [
            loop, sort, matrices, open_and_close, open_and_read, open_deep, status, small_files, large_file,
            fresh_memory, stream, requests, connections, programs, shells, interpreters,
        ]:  # fmt: skip
            used_before, before = used(), time.perf_counter()
            task()
            figures[task.__name__] = [time.perf_counter() - before, used() - used_before]
    finally:
        shutil.rmtree(folder)
    print(json.dumps(figures))


_measure()
