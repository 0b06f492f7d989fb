// simulation/store.hpp -- a store that behaves as TCPStore does; conformance_store.py says in which facts.
#pragma once

#include "universe.hpp"

#include <algorithm>

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/exception.h>

namespace {

// One connection to the store. It is locked while a call is made on it, waits included.
class Store : public c10d::Store {
  public:
    explicit Store(std::shared_ptr<Universe> all, Milliseconds timeout) : c10d::Store(timeout), all_(std::move(all)) {}

    c10::intrusive_ptr<c10d::Store> clone() override
    {
        pause();
        std::unique_lock held(all_->lock);
        all_->calls++;
        if (all_->store_is_gone) {
            all_->changed.wait_for(held, timeout_, [] { return false; });
            C10_THROW_ERROR(DistNetworkError, "The client socket has timed out after " +
                                                  std::to_string(timeout_.count()) +
                                                  "ms while trying to connect to (127.0.0.1, 20000).");
        }
        return c10::make_intrusive<Store>(all_, timeout_);
    }

    using c10d::Store::compareSet;
    using c10d::Store::set;

    void set(const std::string &key, const Bytes &value) override
    {
        if (const auto held = ask(false, value.size())) {
            all_->values[common(key)] = value;
            all_->changed.notify_all();
        }
    }

    Bytes compareSet(const std::string &key, const Bytes &expected, const Bytes &wanted) override
    {
        const auto held = ask(true, wanted.size());
        const auto found = all_->values.find(common(key));
        if (found == all_->values.end() ? !expected.empty() : found->second != expected) {
            return found == all_->values.end() ? expected : found->second;
        }
        all_->values[common(key)] = wanted;
        all_->changed.notify_all();
        return wanted;
    }

    Bytes get(const std::string &key) override
    {
        return multiGet({key}).front();
    }

    int64_t add(const std::string &key, int64_t value) override
    {
        const auto held = ask(true, 8);
        Bytes &found = all_->values[common(key)];
        try {
            value += found.empty() ? 0 : std::stoll(std::string(found.begin(), found.end()));
        }
        catch (const std::exception &) { /* the server ends this connection */
            is_broken_ = true;
            throw_closed();
        }
        found = as_bytes(std::to_string(value));
        all_->changed.notify_all();
        return value;
    }

    bool deleteKey(const std::string &key) override
    {
        const auto held = ask(true);
        return all_->values.erase(common(key)) != 0;
    }

    bool check(const std::vector<std::string> &keys) override
    {
        const auto held = ask(true);
        return std::all_of(keys.begin(), keys.end(),
                           [this](const auto &key) { return all_->values.count(common(key)) != 0; });
    }

    int64_t getNumKeys() override
    {
        const auto held = ask(true);
        return static_cast<int64_t>(all_->values.size());
    }

    void wait(const std::vector<std::string> &keys) override
    {
        wait(keys, timeout_);
    }

    void wait(const std::vector<std::string> &keys, const Milliseconds &timeout) override
    {
        auto held = ask(true);
        wait_for_keys(held, keys, timeout);
    }

    void append(const std::string &key, const Bytes &value) override
    {
        if (const auto held = ask(false, value.size())) {
            Bytes &found = all_->values[common(key)];
            found.insert(found.end(), value.begin(), value.end());
            all_->changed.notify_all();
        }
    }

    std::vector<Bytes> multiGet(const std::vector<std::string> &keys) override
    {
        auto held = ask(true);
        wait_for_keys(held, keys, timeout_);
        std::vector<Bytes> found;
        for (const std::string &key : keys) {
            found.push_back(all_->values.at(common(key)));
            all_->bytes += static_cast<int64_t>(found.back().size());
        }
        return found;
    }

    void multiSet(const std::vector<std::string> &keys, const std::vector<Bytes> &values) override
    {
        if (const auto held = ask(false)) {
            for (size_t i = 0; i < keys.size(); i++) {
                all_->values[common(keys[i])] = values[i];
            }
            all_->changed.notify_all();
        }
    }

    void queuePush(const std::string &key, const Bytes &value) override
    {
        const auto held = ask(true, value.size());
        all_->queues[common(key)].push_back(value);
        all_->changed.notify_all();
    }

    Bytes queuePop(const std::string &key, bool waits) override
    {
        auto held = ask(true);
        auto &queue = all_->queues[common(key)];
        if (queue.empty() && !waits) {
            C10_THROW_ERROR(DistQueueEmptyError, "queue is empty");
        }
        wait_until(held, {key}, timeout_, [&queue] { return !queue.empty(); });
        Bytes found = std::move(queue.front());
        queue.pop_front();
        return found;
    }

    int64_t queueLen(const std::string &key) override
    {
        const auto held = ask(true);
        return static_cast<int64_t>(all_->queues[common(key)].size());
    }

    bool hasExtendedApi() const override
    {
        return true;
    }

  private:
    // The locks of a call; none: the server is gone, and the call, to which there is no answer, does not see that.
    struct Call {
        std::unique_lock<std::mutex> connection, universe;
        explicit operator bool() const
        {
            return universe.owns_lock();
        }
    };

    Call ask(bool is_answered, size_t bytes = 0)
    {
        pause();
        Call call{std::unique_lock(connection_), std::unique_lock(all_->lock)};
        all_->calls++;
        all_->bytes += static_cast<int64_t>(bytes);
        if (is_broken_) {
            throw_closed();
        }
        if (all_->store_is_gone) {
            if (saw_the_end_) {
                C10_THROW_ERROR(DistNetworkError, "failed to send, Broken pipe");
            }
            saw_the_end_ = true;
            if (is_answered) {
                throw_closed();
            }
            call.universe.unlock();
        }
        return call;
    }

    [[noreturn]] static void throw_closed()
    {
        C10_THROW_ERROR(DistNetworkError, "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote "
                                          "server shutdown or crash?");
    }

    template <typename Condition>
    void wait_until(Call &call, const std::vector<std::string> &keys, Milliseconds timeout, Condition holds)
    {
        const auto ends = [&] { return all_->store_is_gone || holds(); };
        if (timeout == kNoTimeout) {
            all_->changed.wait(call.universe, ends);
        }
        else if (!all_->changed.wait_for(call.universe, timeout, ends)) {
            std::string names;
            for (const std::string &key : keys) {
                names += (names.empty() ? "/" : ", /") + common(key);
            }
            C10_THROW_ERROR(DistStoreError,
                            "wait timeout after " + std::to_string(timeout.count()) + "ms, keys: " + names);
        }
        if (all_->store_is_gone) {
            saw_the_end_ = true;
            throw_closed();
        }
    }

    void wait_for_keys(Call &call, const std::vector<std::string> &keys, Milliseconds timeout)
    {
        size_t n = 0; /* of the keys that are there: many ranks wait for many keys */
        wait_until(call, keys, timeout, [&] {
            while (n < keys.size() && all_->values.count(common(keys[n])) != 0) {
                n++;
            }
            return n == keys.size();
        });
    }

    const std::shared_ptr<Universe> all_;
    std::mutex connection_; // taken before the universe's
    bool is_broken_ = false, saw_the_end_ = false;
};

} // namespace
