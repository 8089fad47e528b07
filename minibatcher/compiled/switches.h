// What can be turned off (-DTRIM=0), to measure what it brings.
#pragma once

#ifndef FETCH_WEIGHTS  // while one panel of weights is multiplied, the next is on its way from memory
#define FETCH_WEIGHTS 1
#endif
#ifndef FETCH_CACHE  // likewise keys and values of a decode
#define FETCH_CACHE 1
#endif
#ifndef CHUNKS  // a chunk's attention as matrix products, not query by query
#define CHUNKS 1
#endif
#ifndef TRIM  // after the last attention only tokens whose logits are wanted go on
#define TRIM 1
#endif
