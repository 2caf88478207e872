from benchmarks.command import main

if __name__ == "__main__":  # the processes that a benchmark spawns import this file again
    main()
