#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace dflash::cpu {
namespace {

struct Job {
  const std::function<void()>& body;
  int open_places;  // workers that may still join
  int running = 0;  // workers inside body
};

class Pool {
 public:
  void run(int workers, const std::function<void()>& body) {
    Job job{body, workers};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      grow(workers);
      jobs_.push_back(&job);
    }
    if (workers == 1)
      wake_.notify_one();
    else
      wake_.notify_all();
    body();
    // All items are taken: whoever has not joined need not, whoever has must leave `job` alone.
    std::unique_lock<std::mutex> lock(mutex_);
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
    left_.wait(lock, [&] { return job.running == 0; });
  }

 private:
  void grow(int workers) {
    try {
      for (; started_ < workers; ++started_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // The system's thread limit: the caller and the workers there are do the work.
    }
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return !jobs_.empty(); });
      Job* job = jobs_.front();
      if (--job->open_places == 0) jobs_.pop_front();
      ++job->running;
      lock.unlock();
      job->body();
      lock.lock();
      if (--job->running == 0) left_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, left_;
  std::deque<Job*> jobs_;
  int started_ = 0;
};

// Never destroyed: detached workers may outlive static destructors. A forked child has none of its
// parent's threads and perhaps a locked mutex, so it starts with a pool of its own.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { the_pool.store(nullptr); });
  (void)registered;
  Pool* current = the_pool.load();
  if (current == nullptr) {
    Pool* fresh = new Pool;
    if (the_pool.compare_exchange_strong(current, fresh))
      current = fresh;
    else
      delete fresh;
  }
  return *current;
}

}  // namespace

void run_on_threads(int threads, const std::function<void()>& body) {
  if (threads <= 1)
    body();
  else
    pool().run(threads - 1, body);
}

}  // namespace dflash::cpu
