// CartPole with automatic resets and random actions: the loop that a compiler can vectorise, over a structure of arrays.
// The same work as rlfx's environment: Feistel random numbers, polynomial sine and cosine, one reset draw a step.
#include <math.h>
#include <stdint.h>

static inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

typedef struct { uint32_t left, right; } Block;

static inline Block block(uint32_t k0, uint32_t k1, uint32_t counter) {
  Block b = {k0 + counter * 0x9E3779B9u, k1};
  b.right ^= mix(b.left);
  b.left += mix(b.right);
  b.right ^= mix(b.left + 0xA5A5A5A5u);
  return b;
}

static inline float uniform(uint32_t bits) {
  union { uint32_t i; float f; } u = {(bits >> 9) | 0x3F800000u};
  return (u.f - 1.0f) * 0.1f - 0.05f;
}

#define TILE 512
#define SPLIT 0x85A308D3u
#define FOLD 0x13198A2Eu
#define BITS 0x03707344u

void rollout(int n, int steps, const uint32_t *restrict k0, const uint32_t *restrict k1, float *restrict x,
             float *restrict v, float *restrict a, float *restrict w, int32_t *restrict t,
             float *restrict reward, int32_t *restrict episodes) {
  for (int start = 0; start < n; start += TILE) {
    int stop = start + TILE < n ? start + TILE : n;
    for (int k = 0; k < steps; k++) {
      for (int i = start; i < stop; i++) {
        Block act = block(k0[i], k1[i] ^ FOLD, 2 * k), step = block(k0[i], k1[i] ^ FOLD, 2 * k + 1);
        uint32_t action = (((block(act.left, act.right ^ BITS, 0).left >> 16) * 2) >> 16);
        Block reset = block(step.left, step.right ^ SPLIT, 1);
        Block first = block(reset.left, reset.right ^ BITS, 0), second = block(reset.left, reset.right ^ BITS, 1);

        float turns = floorf(a[i] * 0.31830988618f + 0.5f);
        float r = (a[i] - turns * 3.140625f) - turns * 0.000967653589793f, r2 = r * r;
        float half = 0.5f * turns, sign = 1.0f - 4.0f * (half - floorf(half));
        float s = sign * r * (0.99999999527f + r2 * (-0.16666657257f + r2 * (0.00833303346f + r2 * (-0.00019807761f + r2 * 2.60222e-06f))));
        float c = sign * (0.99999994841f + r2 * (-0.49999897299f + r2 * (0.04166339202f + r2 * (-0.00138522670f + r2 * 2.31210762e-05f))));
        float push = (20.0f * (float)action - 10.0f + 0.05f * w[i] * w[i] * s) * (1.0f / 1.1f);
        float acc = (9.8f * s - c * push) / (0.5f * (4.0f / 3.0f - (0.1f / 1.1f) * c * c));
        float nx = x[i] + 0.02f * v[i], nv = v[i] + 0.02f * (push - (0.05f / 1.1f) * acc * c);
        float na = a[i] + 0.02f * w[i], nw = w[i] + 0.02f * acc;
        int32_t nt = t[i] + 1;
        int done = (fabsf(nx) > 2.4f) | (fabsf(na) > 0.20943951f) | (nt >= 500);
        x[i] = done ? uniform(first.left) : nx;
        v[i] = done ? uniform(second.left) : nv;
        a[i] = done ? uniform(first.right) : na;
        w[i] = done ? uniform(second.right) : nw;
        t[i] = done ? 0 : nt;
        reward[i] += 1.0f;
        episodes[i] += done;
      }
    }
  }
}
