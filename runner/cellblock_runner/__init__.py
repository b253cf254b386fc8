"""The runner: the Python that lives inside a sandbox.

One process, one thread, one IPython shell. The host sends requests over a socket (PROTOCOL.md), the runner answers them
one at a time:

    frames      bytes <-> (header, payload), pure
    channel     the socket, with descriptors
    interrupts  when SIGINT may become KeyboardInterrupt
    lanes       stdout, stderr and the channel, kept in order by markers
    bundles     what IPython displays -> what a frame carries
    processes   !cmd and %%script without a terminal and without threads
    asking      questions of a running cell to the host
    packages    folders of packages that the host adds
    mcptools    how generated modules call tools of MCP servers, with these:
      tool_models   arguments
      tool_values   results
      tool_modules  when the modules are imported
      tool_files    how the modules come into the working folder
    pip_lines   what a command line of pip asks for, which is done by these:
      pip_answers   installing, listing, showing
      pip_programs  where a cell starts pip as a program
      pip_client    the program that a shell runs in its place
    shell       the IPython shell itself
    displays    how objects show themselves that are made for browsers
      plotly_figures  figures in words
      fonts           characters that matplotlib's own fonts lack
    variables   what a cell changed in the namespace
    files       file requests, and what a cell changed in the working folder
    harmless    which cells change nothing
    branch      where the session can be copied while it lives
    threads     how the other threads come along
    luggage     what a copy takes along and what it lost, from these:
      descriptors   open files and connections
      private       descriptors that no other process has
      loops         event loops
      pools         executors without their threads or processes
      mappings      shared memory
      folders       the content of the session's folders
    reseed      fresh randomness in every copy
    seeds       what is not renewed, because code has seeded it
    imported    what is done to modules of others as soon as they are imported
    serve       puts all of it together
    zygote      the warm process that fresh sessions are copies of

In a container, where nobody outside can do it, these make and watch the processes:

    first       what the first process does first: it begins the warm process
    stock       what warming up imports, in one file for all containers of an image
    supervisor  the first process then: one stream to the host, everything else behind it
    strands     many streams over that one
    family      the warm process, stewards, checkpoints
    fences      what a process takes from itself

The user's code shares this process, so nothing here protects anything: the host treats every frame as a claim.
"""

PROTOCOL_VERSION = 2
