/* A heated bar, computed by MPI ranks: dppo learns to keep a temperature profile with three heaters.

     mpicc -O2 -I "$(python -m dppo.remote)" heat.c -o heat -lm
     dppo train dppo.remote:make --env-kwargs '{"command": ["/path/to/heat"]}' --ranks-per-env 2

   The ten lines that dppo needs are marked. Each rank owns CELLS / ranks cells of the bar. */
#include <math.h>
#include <mpi.h>
#include <stdlib.h>
#include <string.h>
#define DPPO_IMPLEMENTATION /* 1 */
#include "dppo.h"           /* 2 */

#define CELLS 48
#define HEATERS 3
#define SUBSTEPS 20   /* solver steps of a control interval */
#define INTERVALS 100 /* control intervals of an episode */
#define DIFFUSION 0.4

static double wanted(int cell) { return 1.0 + 0.5 * sin(M_PI * cell / (CELLS - 1)); }

int main(int argc, char **argv) {
  int rank, ranks, left, right, interval = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (CELLS % ranks) MPI_Abort(MPI_COMM_WORLD, 2);
  left = rank ? rank - 1 : MPI_PROC_NULL;
  right = rank < ranks - 1 ? rank + 1 : MPI_PROC_NULL;
  int cells = CELLS / ranks, first = rank * cells;
  double bar[CELLS], power[HEATERS], reward = 0.0;
  double *now = calloc(cells + 2, sizeof *now), *next = calloc(cells + 2, sizeof *next);

  dppo *d = dppo_open_all(DPPO_DOUBLE, "temperature[48]", "power[3](0:1)", MPI_COMM_WORLD); /* 3 */
  for (;;) {
    int end = interval == INTERVALS ? DPPO_TRUNCATED : DPPO_RUNNING;                /* 4 */
    MPI_Gather(now + 1, cells, MPI_DOUBLE, bar, cells, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    int reply = dppo_step_all(d, bar, reward, end, power, MPI_COMM_WORLD);          /* 5 */
    if (reply == DPPO_STOP) break;                                                  /* 6 */
    if (reply == DPPO_RESET) {                                                      /* 7 */
      srand((unsigned)dppo_seed(d));                                                /* 8 */
      double start = 0.5 * rand() / RAND_MAX;
      for (int cell = 0; cell < cells + 2; cell++) now[cell] = start;
      interval = 0;
      continue;                                                                     /* 9 */
    }
    for (int substep = 0; substep < SUBSTEPS; substep++) {
      MPI_Sendrecv(now + 1, 1, MPI_DOUBLE, left, 0, now + cells + 1, 1, MPI_DOUBLE, right, 0, MPI_COMM_WORLD,
                   MPI_STATUS_IGNORE);
      MPI_Sendrecv(now + cells, 1, MPI_DOUBLE, right, 1, now, 1, MPI_DOUBLE, left, 1, MPI_COMM_WORLD,
                   MPI_STATUS_IGNORE);
      if (left == MPI_PROC_NULL) now[0] = 0.0; /* the ends of the bar are cold */
      if (right == MPI_PROC_NULL) now[cells + 1] = 0.0;
      for (int cell = 1; cell <= cells; cell++) {
        int heater = (first + cell - 1) * HEATERS / CELLS;
        next[cell] = now[cell] + DIFFUSION * (now[cell - 1] - 2 * now[cell] + now[cell + 1]) + 0.02 * power[heater];
      }
      memcpy(now + 1, next + 1, cells * sizeof *now);
    }
    double error = 0.0;
    for (int cell = 1; cell <= cells; cell++) error += pow(now[cell] - wanted(first + cell - 1), 2) / CELLS;
    MPI_Reduce(&error, &reward, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    reward = -reward;
    interval++;
  }
  dppo_close(d); /* 10 */
  MPI_Finalize();
}
