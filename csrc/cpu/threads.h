// Worker threads shared by all calls of the process. No OpenMP: torch has its own runtime of it.
#pragma once
#include <functional>

namespace dflash::cpu {

// Runs `body` in the calling thread and in at most threads - 1 workers at once, and returns when
// all of them are out of it. `body` takes work items from a counter until none is left, so it does
// not matter how many threads join or when; it must not throw. Calls from several threads share the
// workers; a call whose workers are busy, or could not be started, still ends.
void run_on_threads(int threads, const std::function<void()>& body);

}  // namespace dflash::cpu
