// update_tables: block_tables[places[e]] = blocks[e], for the entries that changed since the step before.
//
//   block_tables  int32, all rows one after the other
//   places        int64 [num_entries], distinct; blocks int32 [num_entries]
//
// Grid: ceil(num_entries / 256) blocks of 256 threads, one entry each.
// Bytes moved: 16 * num_entries, and a sector of 32 bytes for each place.
//
// Budget: update_tables: 16 registers, 0 bytes of shared memory

extern "C" __global__ void __launch_bounds__(256) update_tables(
    int* __restrict__ block_tables, const long long* __restrict__ places, const int* __restrict__ blocks,
    int num_entries) {
    const int entry = blockIdx.x * 256 + threadIdx.x;
    if (entry < num_entries) block_tables[places[entry]] = blocks[entry];
}
