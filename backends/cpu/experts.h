// Rows in the order of the experts that they go to: what experts_sort writes and the products read.
#pragma once
#include <cstdint>

#include "simd.h"

namespace mi {

// One i32 array of 2 E + 2: where each expert's rows begin [E + 1], how many experts have any, and which.
class Groups {
public:
    Groups(int32_t* table, i64 num_experts) : table_(table), E_(num_experts) {}
    i64 begin(i64 expert) const { return table_[expert]; }
    i64 num_hit() const { return table_[E_ + 1]; }
    i64 hit(i64 i) const { return table_[E_ + 2 + i]; }
    int32_t* starts() const { return table_; }

    // List the experts that have rows, from the starts.
    void list_hits() const {
        int32_t count = 0;
        for (i64 e = 0; e < E_; ++e)
            if (table_[e + 1] > table_[e]) table_[E_ + 2 + count++] = static_cast<int32_t>(e);
        table_[E_ + 1] = count;
    }

private:
    int32_t* table_;
    i64 E_;
};

}  // namespace mi
