#include "builds.h"

#include <algorithm>
#include <stdexcept>

#include "amx_permission.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tailrace {
namespace {

bool cpu_has(const std::string &name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (name == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#if defined(TR_EMULATE)
    if (name == "avx512") return cpu_has("avx2");
#endif
    if (name == "avx512")
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && cpu_has("avx2");
    if (name == "avx512bf16") return cpu_has("avx512") && __builtin_cpu_supports("avx512bf16");
#if defined(TR_HAVE_AMX)
    if (name == "amx") return cpu_has("avx512bf16") && __builtin_cpu_supports("avx512fp16") && amx_permitted();
#endif
#elif defined(__aarch64__)
    if (name == "neon") return true; // part of the architecture
#if defined(__ARM_FEATURE_DOTPROD)
    if (name == "dotprod") return true; // this very file is compiled for nothing less
#elif defined(__linux__)
    if (name == "dotprod") return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#endif
#endif
    return name == "portable";
}

const Kernels *built(const std::string &name) {
    if (name == "portable") return kernels_portable();
#if defined(TR_HAVE_X86)
    if (name == "avx2") return kernels_avx2();
    if (name == "avx512") return kernels_avx512();
#if !defined(TR_EMULATE)
    if (name == "avx512bf16") return kernels_avx512bf16();
#if defined(TR_HAVE_AMX)
    if (name == "amx") return kernels_amx();
#endif
#endif
#elif defined(TR_HAVE_ARM)
    if (name == "neon") return kernels_neon();
    if (name == "dotprod") return kernels_dotprod();
#endif
    return nullptr;
}

} // namespace

std::vector<std::string> available() {
    std::vector<std::string> names;
    for (const char *name : {"amx", "avx512bf16", "avx512", "avx2", "dotprod", "neon", "portable"})
        if (built(name) && cpu_has(name)) names.emplace_back(name);
    return names;
}

const Kernels *chosen(const std::string &name) {
    const auto names = available();
    if (std::find(names.begin(), names.end(), name) == names.end()) {
        std::string list;
        for (const auto &n : names) list += (list.empty() ? "" : ", ") + n;
        throw std::invalid_argument("kernels '" + name + "' cannot run on this machine; it can run: " + list);
    }
    return built(name);
}

} // namespace tailrace
