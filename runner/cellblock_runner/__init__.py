"""The runner: the Python process inside a sandbox.

One process, one thread, one IPython shell. The host sends requests over a socket (PROTOCOL.md), and
the runner answers them one at a time:

    frames      bytes <-> (header, payload), pure
    channel     the socket, with descriptors
    interrupts  when SIGINT may become KeyboardInterrupt
    streams     stdout, stderr and the channel, kept in order by sequence markers
    bundles     IPython MIME bundles -> frame payloads
    processes   !cmd and %%script without a terminal and without threads
    host_calls  host calls from a running cell
    packages    package folders added by the host
    mcptools    calls from generated modules to tools of MCP servers, with these:
      tool_models   arguments
      tool_values   results
      tool_modules  importing and reloading the modules
      tool_files    writing the modules into the working folder
    pip_arguments  parsing of pip command lines, which these carry out:
      pip_commands  install, list, show
      pip_shim      interception of cells that start pip as a program
      pip_client    the program that a shell runs instead of pip
    commands    programs that the host starts for a cell, where the session may start none
    subprocess_shim  replacements for `subprocess` and `os` functions there
    shell       the IPython shell itself
    displays    text and images for objects made for browsers
      plotly_figures  text descriptions of figures
      fonts           characters that matplotlib's own fonts lack
    variables   changes to the namespace by a cell
    files       file requests, and changes to the working folder by a cell
    readonly_cells  detection of cells that change nothing
    prefault    fewer page faults after a copy
    branch      the point at which a live session can be copied
    threads     how the other threads survive a copy
    fork_state  state saved for a copy and state lost in it, from these:
      descriptors   open files and connections
      private_descriptors  descriptors that no other process has
      loops         event loops
      pools         executors without their threads or processes
      mappings      shared memory
      folders       the content of the session's folders
    reseed      fresh randomness in every copy
    seeds       generators that are not reseeded, because user code has seeded them
    import_hooks  functions that run when third-party modules are imported
    serve       puts all of it together
    zygote      the warm process that fresh sessions are forked from

In a container, where no process outside can do it, these start and monitor the processes:

    bootstrap       entry point of the first process: starts the warm process
    import_cache    the modules imported at warm-up, in one file for all containers of an image
    supervisor      the first process after that: carries out the requests of the host
    messages        messages between the supervisor and the host
    mux             many streams over one
    mux_connection  the stream to the host, and the channels and pipes that share it
    poller          waits for descriptors
    process_table   which session every process belongs to; ends those of a session
    launcher        starts approved programs
    side_process    an approved program
    sockets         which processes hold the socket of a connection
    forkserver      the warm process, subreapers, checkpoints
    confine         privileges that a process drops from itself

User code shares this process, so nothing here is a security boundary: the host treats every frame
as an untrusted claim.
"""

PROTOCOL_VERSION = 2
