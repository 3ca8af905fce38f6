// Describes kernels to compiler.py: names, parameters, and how to call one with an array of pointers to arguments.
#pragma once

#include <type_traits>
#include <typeinfo>
#include <utility>

#include "emulator.h"

namespace emulator {

struct Parameter {
    unsigned size;
    const char* kind;  // "pointer", "signed", "unsigned", "float", "bool", "struct"
    const char* type;  // as typeid names it; of a pointer, what it points to
};

struct Kernel {
    const char* name;
    void (*call)(void** arguments);
    unsigned num_parameters;
    const Parameter* parameters;
    unsigned most_threads;
};

// The arguments of __launch_bounds__: a launch with more threads fails on a GPU.
constexpr unsigned most_threads(unsigned threads = 1024, unsigned = 0) { return threads; }

template <typename T>
constexpr const char* kind_of() {
    if constexpr (std::is_pointer_v<T>) return "pointer";
    else if constexpr (std::is_same_v<T, bool>) return "bool";
    else if constexpr (std::is_floating_point_v<T>) return "float";
    else if constexpr (std::is_integral_v<T>) return std::is_signed_v<T> ? "signed" : "unsigned";
    else return "struct";
}

template <auto function>
struct Describe;

template <typename... Arguments, void (*function)(Arguments...)>
struct Describe<function> {
    EMULATOR_UNCHECKED static void call(void** arguments) { unpack(arguments, std::index_sequence_for<Arguments...>{}); }

    static Kernel as(const char* name, unsigned most_threads) {
        static const Parameter parameters[] = {
            {sizeof(Arguments), kind_of<Arguments>(), typeid(std::remove_pointer_t<Arguments>).name()}...,
            {0, nullptr, nullptr},
        };
        return {name, call, sizeof...(Arguments), parameters, most_threads};
    }

private:
    template <size_t... index>
    EMULATOR_UNCHECKED static void unpack(void** arguments, std::index_sequence<index...>) {
        function(*static_cast<Arguments*>(arguments[index])...);
    }
};

}  // namespace emulator
