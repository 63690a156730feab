// Calls functions one after the other, with arguments that are all integers or addresses.
//
// A call is a row of words: how many there are, the function, whether it returns a status, the number
// of arguments, the arguments, and arrays that they point to.

#include <cstddef>
#include <cstdint>
#include <utility>

namespace {

constexpr size_t MOST = 48;  // arguments

template <size_t>
using Word = int64_t;

template <size_t... I>
int call(const int64_t function, const int64_t* words, std::index_sequence<I...>) {
    return reinterpret_cast<int (*)(Word<I>...)>(function)(words[I]...);
}

template <size_t COUNT>
int call_with(const int64_t function, const int64_t* words) {
    return call(function, words, std::make_index_sequence<COUNT>());
}

using Caller = int (*)(int64_t, const int64_t*);

template <size_t... COUNT>
Caller caller(int64_t count, std::index_sequence<COUNT...>) {
    static constexpr Caller all[] = {call_with<COUNT>...};
    return all[count];
}

}  // namespace

extern "C" int64_t most_arguments() { return MOST; }

// Returns 0, or the first status that is not, or -1 for an exception of C++, which would end the
// process: then the functions after it are not called.
extern "C" int call_all(const int64_t* words, int64_t calls) try {
    for (int64_t i = 0; i < calls; ++i) {
        const int64_t length = words[0], function = words[1], has_status = words[2];
        const Caller call = caller(words[3], std::make_index_sequence<MOST + 1>());
        const int returned = call(function, words + 4);
        if (has_status && returned) return returned;
        words += length;
    }
    return 0;
} catch (...) {
    return -1;
}
