// desync/fp_board.cpp -- see fp_board.h. The keys in the store, below the prefix of the board:
//
//   "place of R"            of rank R: a number (Calls::next), seconds since the machine's start, process number, start of the
//                           process in ticks, machine; and " finished" at the end once the rank has finished
//   "places"                the number of ranks that have set their place
//   "call", "answer of R"   see fp_calls.hpp
//
// and below the generation, after fp_board_join():
//
//   "members"               the number of ranks that have entered
//   "member R"              set when rank R enters
//   "posts"                 the number of posts
//   "post N"                the rank and the text of post N, from 1
//   "readers of N"          the number of ranks that have read post N
#include "desync/fp_board.hpp"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace fp {
namespace {

constexpr std::chrono::seconds store_patience{10}; // for one call over the second connection
constexpr double end_patience = 0.5;               // seconds that a stop waits for the thread that answers
constexpr double share = 0.2;                      // of the beat, that a rank waits before it calls
constexpr double most_of_a_pulse = 0.7; // seconds between two looks for a call: liveness.py expects an answer in 1.6 s

std::string
in_file(const std::string &path)
{
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
}

// A name of the machine and its process namespace, in which a process number is unique. Empty: the system does not tell.
std::string
this_machine()
{
    std::string boot = in_file("/proc/sys/kernel/random/boot_id");
    char space[64];
    const ssize_t length = readlink("/proc/self/ns/pid", space, sizeof space);
    if (boot.empty() || length <= 0) {
        return "";
    }
    boot.pop_back(); /* the end of the line */
    return boot + std::string(space, static_cast<size_t>(length));
}

// The start of a process of this machine, in ticks since the machine's start; 0: there is no such process, or it has ended (a
// zombie).
long long
began(long process)
{
    const std::string stat = in_file("/proc/" + std::to_string(process) + "/stat");
    const size_t name_end = stat.rfind(')');
    char state = 'X';
    long long ticks = 0;
    if (name_end != std::string::npos) {
        std::istringstream fields(stat.substr(name_end + 1));
        std::string skipped;
        fields >> state;
        for (int i = 0; i < 18; i++) {
            fields >> skipped;
        }
        fields >> ticks;
    }
    return state == 'Z' || state == 'X' ? 0 : ticks;
}

// Seconds since the machine's start. Clocks of machines differ, so it is compared on one machine alone.
double
machine_clock()
{
    timespec now{};
    (void)clock_gettime(CLOCK_BOOTTIME, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

constexpr std::string_view finished = " finished"; // at the end of a place

// While one lives, torch writes no stack trace to stderr for a store that fails: at the end of a program nobody needs it.
class Quietly {
  public:
#ifndef C10_USE_GLOG
    Quietly() : level_(std::exchange(FLAGS_caffe2_log_level, 3)) {}
    ~Quietly()
    {
        FLAGS_caffe2_log_level = level_;
    }

  private:
    const int level_;
#endif
};

template <class Number>
std::string
key(const char *name, Number number)
{
    return name + std::to_string(number);
}

} // namespace

c10::intrusive_ptr<c10d::Store>
store_of(const c10d::ProcessGroup &group, const std::string &prefix, bool own)
{
    c10::intrusive_ptr<c10d::Store> store = group.getStore();
    TORCH_CHECK(store, "the process group has no store in C++"); /* such a group may lack a name, too */
    if (own) {
        try {
            store = store->clone();
        }
        catch (const std::exception &) { /* this kind of store has no second connection */
            return {};
        }
        store->setTimeout(store_patience);
    }
    return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

c10::intrusive_ptr<c10d::Store>
best_store_of(const c10d::ProcessGroup &group, const std::string &prefix)
{
    const auto own = store_of(group, prefix, true);
    return own ? own : store_of(group, prefix, false);
}

Registered::Registered(const std::string &name) : name_(name), group_(c10d::resolve_process_group(name)) {}

c10::intrusive_ptr<c10d::ProcessGroup>
Registered::group() const
{
    const c10::intrusive_ptr<c10d::ProcessGroup> ours = group_.lock();
    try {
        if (ours && c10d::resolve_process_group(name_) == ours) {
            return ours;
        }
    }
    catch (const std::exception &) {
    }
    return {};
}

bool
Ending::wait(double seconds)
{
    std::unique_lock held(lock_);
    return changed_.wait_for(held, std::chrono::duration<double>(seconds), [this] { return said_; });
}

void
Ending::say()
{
    const std::lock_guard held(lock_);
    said_ = true;
    changed_.notify_all();
}

Board::Board(c10::intrusive_ptr<c10d::Store> store, int rank, int size, double beat)
    : store_(std::move(store)), rank_(rank), size_(size), beat_(beat), posts_(store_), calls_(store_, rank, size)
{
}

void
Board::appear(double since)
{
    const std::lock_guard held(lock_);
    since_ = since;
    number_ = calls_.next();
    set_place("");
    store_->add("places", 1);
    if (beat_ != 0.0) {
        calls_.ring(); /* ranks on other machines show by their answers that they are of this world, see places() */
    }
}

void
Board::finish()
{
    const std::lock_guard held(lock_);
    const Quietly quietly;
    set_place(finished);
}

void
Board::set_place(std::string_view end)
{
    const long process = getpid();
    std::ostringstream text;
    text << number_ << ' ' << std::fixed << machine_clock() << ' ' << process << ' ' << began(process) << ' '
         << this_machine() << end;
    store_->set(key("place of ", rank_), text.str());
}

void
Board::join(const std::string &generation)
{
    const std::lock_guard held(lock_);
    posts_ = c10::make_intrusive<c10d::PrefixStore>(generation, store_);
}

void
Board::enter()
{
    const std::lock_guard held(lock_);
    posts_->add("members", 1);
    posts_->set(key("member ", rank_), std::string("1"));
}

int64_t
Board::number(const std::string &key)
{
    const std::lock_guard held(lock_);
    return number_at(*posts_, key);
}

int64_t
Board::number_at(c10d::Store &store, const std::string &key)
{
    const std::string text = value_at(store, key);
    return text.empty() ? 0 : std::stoll(text);
}

int64_t
Board::post(const std::string &text)
{
    const std::lock_guard held(lock_);
    return post_of(rank_, text);
}

int64_t
Board::post_of(int rank, const std::string &text)
{
    const int64_t number = posts_->add("posts", 1);
    posts_->set(key("post ", number), std::to_string(rank) + " " + text);
    return number;
}

bool
Board::look(double waited, bool processes)
{
    const std::lock_guard held(lock_);
    const bool all = read_posts();
    if (processes) {
        miss_processes();
    }
    miss_answers(waited);
    return all;
}

bool
Board::read_posts()
{
    for (const int64_t count = number_at(*posts_, "posts"); announced_ < count;) {
        unread_.insert(++announced_);
    }
    std::erase_if(unread_, [this](int64_t number) {
        const std::string post = value_at(*posts_, key("post ", number));
        if (post.empty()) { /* its rank may have ended before it could write the text: that hides no later post */
            return false;
        }
        const int rank = std::stoi(post);
        if (rank != rank_) {
            say(rank, post.substr(post.find(' ') + 1));
            posts_->add(key("readers of ", number), 1);
        }
        return true;
    });
    return unread_.empty();
}

// The places of the ranks that have appeared since this world began, without their number and clock. An earlier world may
// have left other places in the store.
std::map<int, std::string>
Board::places()
{
    std::map<int, std::string> found = values_at(*store_, "place of ", size_);
    const std::string here = this_machine();
    for (auto &[rank, text] : found) {
        std::istringstream fields(text);
        int64_t number = 0;
        double clock = 0.0;
        std::string process, ticks, machine;
        fields >> number >> clock >> process >> ticks >> machine;
        const bool is_here = !here.empty() && machine == here;
        const bool is_new = number >= number_ || (is_here ? clock >= since_ : has_answered(rank)) ||
                            !value_at(*posts_, key("member ", rank)).empty();
        text = is_new ? text.substr(text.find(' ', text.find(' ') + 1) + 1) : "";
    }
    std::erase_if(found, [](const auto &item) { return item.second.empty(); });
    return found;
}

// Whether a rank of another machine, which has appeared before this one, has lived since this one appeared. A rank that
// answers no calls counts as if it had.
bool
Board::has_answered(int rank)
{
    const std::string answer = value_at(*store_, key("answer of ", rank));
    return answer.empty() || Calls::number_of(answer) > number_ || beat_ == 0.0;
}

// Note the ranks of this machine whose process has ended. Places are read from the store only if more ranks have appeared.
void
Board::miss_processes()
{
    const int64_t appeared = number_at(*store_, "places");
    if (appeared != appeared_) {
        const std::string machine = this_machine();
        for (const auto &[rank, text] : places()) {
            std::istringstream fields(text);
            Place place{};
            std::string where;
            if (fields >> place.process >> place.began >> where && !machine.empty() && where == machine) {
                places_.insert_or_assign(rank, place);
            }
        }
        appeared_ = appeared;
    }
    for (const auto &[rank, place] : places_) {
        if (!has_said(rank) && place.has_ended()) {
            say(rank, gone(rank, "the process of rank " + std::to_string(rank) + " (" + std::to_string(place.process) +
                                     ") has ended without a word: killed, or done"));
        }
    }
}

bool
Board::Place::has_ended() const
{
    return fp::began(process) != began;
}

int
Board::ended()
{
    const std::lock_guard held(lock_);
    miss_processes();
    return static_cast<int>(std::ranges::count_if(places_, [](const auto &each) { return each.second.has_ended(); }));
}

// The reason for a rank whose process has ended: the rank has finished, if its place has " finished"; else `why`.
std::string
Board::gone(int rank, const std::string &why)
{
    const auto now = places();
    const auto found = now.find(rank);
    return found == now.end() || !found->second.ends_with(finished)
               ? why
               : "rank " + std::to_string(rank) +
                     " has finished, and comes to no collective any more: it may have had fewer batches than the "
                     "others, or left out a call that all ranks must make; or it has called sys.exit(), see its output";
}

int
Board::call()
{
    const std::lock_guard held(lock_);
    if (values_at(*store_, "answer of ", size_).empty()) {
        return 0;
    }
    const int number = static_cast<int>(made_.size()) + 1;
    made_.emplace(number, calls_.call());
    return number;
}

void
Board::miss_silent(int call)
{
    const std::lock_guard held(lock_);
    const auto found = made_.find(call);
    for (const int rank : found == made_.end() ? std::vector<int>() : silent(found->second)) {
        say(rank, gone(rank, "rank " + std::to_string(rank) +
                                 " does not answer: its process has ended, or its machine is out of reach"));
    }
}

// The ranks that have answered an earlier call and not this one, without ranks whose reason is known.
std::vector<int>
Board::silent(const Call &call)
{
    std::vector<int> found = calls_.silent(call);
    const auto here = found.empty() ? std::map<int, std::string>() : places();
    std::erase_if(found,
                  [&](int rank) { return call.before.count(rank) == 0 || here.count(rank) == 0 || has_said(rank); });
    return found;
}

// Call all ranks after 0.2 beat, and post a beat later which ranks have not answered: those have been stopped for so long. One
// of the ranks that wait calls for all: the others see its call, and make none within a beat.
void
Board::miss_answers(double waited)
{
    if (beat_ == 0.0 || waited < share * beat_) {
        return;
    }
    if (!asked_) {
        const std::string last = calls_.last();
        if (last == other_call_ && seconds(Clock::now() - other_since_) < beat_) {
            return;
        }
        Call call = calls_.call_after(last);
        if (call.is_mine) {
            asked_.emplace(std::move(call));
        }
        else {
            other_call_ = call.text;
            other_since_ = call.since;
        }
    }
    else if (asked_->has_waited(beat_)) {
        const Call call = std::move(*asked_);
        asked_.reset();
        miss_processes();
        for (const int rank : silent(call)) {
            char beat[32];
            std::snprintf(beat, sizeof beat, "%g", beat_);
            (void)post_of(rank, gone(rank, "rank " + std::to_string(rank) + " has given no sign of life for " + beat +
                                               " s: it is stopped, or out of reach"));
        }
        (void)read_posts();
    }
}

void
Board::say(int rank, const std::string &text)
{
    const std::lock_guard held(said_lock_);
    said_.try_emplace(rank, text);
}

bool
Board::has_said(int rank)
{
    const std::lock_guard held(said_lock_);
    return said_.count(rank) != 0;
}

std::map<int, std::string>
Board::said()
{
    const std::lock_guard held(said_lock_);
    return said_;
}

std::map<int, std::string>
Board::entered()
{
    const std::lock_guard held(lock_);
    return places();
}

namespace {

// Answer calls until the flag is set or torch has destroyed the group.
void
answer(Ending &ending, const Registered &group, Calls &calls, double interval)
{
    while (!ending.wait(interval) && group.group()) {
        calls.answer();
    }
}

PyObject *
as_dict(const std::map<int, std::string> &texts)
{
    PyObject *dict = PyDict_New();
    for (auto each = texts.begin(); dict != nullptr && each != texts.end(); ++each) {
        const auto &[rank, text] = *each;
        PyObject *key = PyLong_FromLong(rank);
        PyObject *value = key == nullptr
                              ? nullptr
                              : PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
        if (value == nullptr || PyDict_SetItem(dict, key, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return dict;
}

} // namespace
} // namespace fp

extern "C" {

fp_board *
fp_board_new(const char *group, const char *prefix, double beat, int own)
{
    return fp::guarded<fp_board *>(nullptr, [&] {
        return fp::unlocked([&] {
            const auto found = c10d::resolve_process_group(group);
            const auto store = own != 0 ? fp::best_store_of(*found, prefix) : fp::store_of(*found, prefix, false);
            return new fp_board{
                .board = {store, found->getRank(), found->getSize(), beat},
                .name = group,
                .prefix = prefix,
                .beat = beat,
            };
        });
    });
}

void
fp_board_free(fp_board *board)
{
    if (board != nullptr) {
        fp_board_stop(board);
        fp::unlocked([&] { delete board; });
    }
}

int
fp_board_join(fp_board *board, const char *generation)
{
    return fp::guarded(-1, [&] { fp::unlocked([&] { board->board.join(generation); }); });
}

int
fp_board_enter(fp_board *board)
{
    return fp::guarded(-1, [&] { fp::unlocked([&] { board->board.enter(); }); });
}

int
fp_board_finish(fp_board *board)
{
    return fp::guarded(-1, [&] {
        if (board->process == getpid()) {
            fp::unlocked([&] { board->board.finish(); });
        }
    });
}

int
fp_board_appear(fp_board *board, double since)
{
    return fp::guarded(-1, [&] {
        fp::unlocked([&] {
            board->board.appear(since);
            if (board->beat == 0.0) {
                return;
            }
            const fp::Registered registered(board->name);
            const auto found = registered.group();
            const auto store = found ? fp::store_of(*found, board->prefix, true) : c10::intrusive_ptr<c10d::Store>();
            if (!store) { /* over a shared connection this rank would answer late, and seem to be stopped */
                return;
            }
            const int rank = found->getRank();
            store->set(fp::key("answer of ", rank), std::string("none yet"));
            board->answering = std::make_shared<fp::Ending>();
            std::thread([ending = board->ending, ended = board->answering, registered,
                         calls = std::make_unique<fp::Calls>(store, rank, found->getSize()),
                         interval = std::min(fp::most_of_a_pulse, board->beat / 4)]() mutable {
                try {
                    fp::answer(*ending, registered, *calls, interval);
                }
                catch (...) { /* the store is out of reach: ranks that wait see that themselves */
                }
                calls.reset(); /* before say(): a FileStore writes when it goes; half a record would hang its readers */
                ended->say();
            }).detach();
        });
    });
}

// The wait for the thread ends after end_patience: the thread may wait for a store that does not answer.
void
fp_board_stop(fp_board *board)
{
    if (board->process == getpid()) {
        fp::unlocked([&] {
            board->ending->say();
            if (board->answering) {
                (void)board->answering->wait(fp::end_patience);
            }
        });
    }
}

int
fp_board_post(fp_board *board, const char *text, int64_t *number)
{
    return fp::guarded(-1, [&] { *number = fp::unlocked([&] { return board->board.post(text); }); });
}

int
fp_board_number(fp_board *board, const char *key, int64_t *number)
{
    return fp::guarded(-1, [&] { *number = fp::unlocked([&] { return board->board.number(key); }); });
}

int
fp_board_look(fp_board *board, double waited, int processes)
{
    return fp::guarded(-1,
                       [&] { return fp::unlocked([&] { return board->board.look(waited, processes != 0); }) ? 1 : 0; });
}

int
fp_board_ended(fp_board *board)
{
    return fp::guarded(-1, [&] { return fp::unlocked([&] { return board->board.ended(); }); });
}

int
fp_board_call(fp_board *board)
{
    return fp::guarded(-1, [&] { return fp::unlocked([&] { return board->board.call(); }); });
}

int
fp_board_miss_silent(fp_board *board, int64_t call)
{
    return fp::guarded(-1, [&] { fp::unlocked([&] { board->board.miss_silent(static_cast<int>(call)); }); });
}

PyObject *
fp_board_said(fp_board *board)
{
    return fp::guarded<PyObject *>(nullptr,
                                   [&] { return fp::as_dict(fp::unlocked([&] { return board->board.said(); })); });
}

PyObject *
fp_board_entered(fp_board *board)
{
    return fp::guarded<PyObject *>(nullptr,
                                   [&] { return fp::as_dict(fp::unlocked([&] { return board->board.entered(); })); });
}

} // extern "C"
