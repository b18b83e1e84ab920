/* dppo.h: let dppo train a controller for a solver that owns its time loop. C99, POSIX, no dependencies.

   In exactly one C file:

     #define DPPO_IMPLEMENTATION
     #include "dppo.h"

     dppo *d = dppo_open(DPPO_DOUBLE, "temperature[64]", "heaters[3](0:1)");
     for (;;) {
       int reply = dppo_step(d, temperature, reward, DPPO_RUNNING, heaters);
       if (reply == DPPO_STOP) break;
       if (reply == DPPO_RESET) { initialize(dppo_seed(d)); continue; }
       advance(heaters);
     }
     dppo_close(d);

   Parts of observations and actions are written as name[shape](low:high), separated by spaces: `lift`, `probes[3,16]`,
   `jets[2](-1:1)`. Without a shape a part is one number; observations need no bounds, actions do. Arrays hold all parts
   in this order, in C order.

   The first call of dppo_step sends nothing of use and returns DPPO_RESET: initialize, and call it with the first
   observation. From then on it hands over the observation, the reward of the last action, and whether the episode has
   ended, and returns

     DPPO_ACT     `action` holds the next action: advance the solver by one control interval;
     DPPO_RESET   begin a new episode, whose random numbers follow from dppo_seed: the next call hands over its first
                  observation, and its reward is ignored;
     DPPO_STOP    leave the loop.

   A solver that can write restart files opens with DPPO_DOUBLE | DPPO_RESTART, and handles two replies more:

     DPPO_SAVE    write a file or folder at dppo_path(d), and call dppo_step again with the same numbers;
     DPPO_LOAD    go on from the one at dppo_path(d), which must not be changed: the next call hands over the observation
                  that the solver had when it wrote it.

   With MPI, include mpi.h first, and use dppo_open_all and dppo_step_all on all ranks: rank 0 talks, the others get what
   it received. If DPPO_NAP is set, which dppo does where ranks share cores, the others sleep while they wait for it, and
   are late by an eighth of the wait, 20 ms at most. On an error the program prints a line and exits with status 1.

   The protocol is described in docs/SOLVERS.md of dppo. */
#if defined(DPPO_IMPLEMENTATION) && !defined(_POSIX_C_SOURCE) && !defined(_GNU_SOURCE)
#define _POSIX_C_SOURCE 200809L /* for -std=c99: include this header before those of the system then */
#endif
#ifndef DPPO_H
#define DPPO_H

#ifdef __cplusplus
extern "C" {
#endif

#define DPPO_VERSION 1
#define DPPO_FLOAT 4
#define DPPO_DOUBLE 8
#define DPPO_RESTART 16 /* added to the type: the solver handles DPPO_SAVE and DPPO_LOAD */

#define DPPO_STOP 0
#define DPPO_ACT 1
#define DPPO_RESET 2
#define DPPO_SAVE 3
#define DPPO_LOAD 4

#define DPPO_RUNNING 0
#define DPPO_TERMINATED 1 /* the episode has ended in a final state, whose future is worth nothing */
#define DPPO_TRUNCATED 2  /* the episode is cut off, for example by a time limit */

typedef struct dppo dppo;

/* Connect to dppo, whose address is in DPPO_ADDRESS, with the secret in DPPO_SECRET. `type`: that of the numbers in
   observations and actions, DPPO_FLOAT or DPPO_DOUBLE. */
dppo *dppo_open(int type, const char *observation, const char *action);

int dppo_step(dppo *d, const void *observation, double reward, int end, void *action);

/* The seed of the episode that the last DPPO_RESET began. */
unsigned long long dppo_seed(const dppo *d);

/* The options of this episode as JSON text; "{}" if there are none. */
const char *dppo_options(const dppo *d);

/* The path of the last DPPO_SAVE or DPPO_LOAD. */
const char *dppo_path(const dppo *d);

/* Add a number to the `info` of the next step, such as a loss of energy: dppo records those of --info-keys. */
void dppo_info(dppo *d, const char *name, double value);

void dppo_close(dppo *d);

#ifdef MPI_VERSION
dppo *dppo_open_all(int type, const char *observation, const char *action, MPI_Comm ranks);
int dppo_step_all(dppo *d, const void *observation, double reward, int end, void *action, MPI_Comm ranks);
#endif

#ifdef __cplusplus
}
#endif
#endif /* DPPO_H */

#ifdef DPPO_IMPLEMENTATION

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define DPPO_MAX_INFO 32
#define DPPO_NAME 32
#define DPPO_WAIT_S 60 /* for dppo to listen, and to answer */
#define DPPO_SHORTEST_NAP_NS 10000
#define DPPO_LONGEST_NAP_NS 20000000

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

/* Messages have the byte order of the machine, which dppo_open tells by sending the number DPPO_VERSION. */
typedef struct {
  uint32_t kind; /* DPPO_ACT, DPPO_RESET, ... */
  uint32_t size; /* bytes that follow: the action, the options, or the path */
  uint64_t seed;
} dppo_reply;

typedef struct {
  uint32_t end;
  uint32_t infos; /* pairs of name and number that follow the observation */
  double reward;
} dppo_state;

typedef struct {
  char name[DPPO_NAME];
  double value;
} dppo_number;

struct dppo {
  int socket;
  size_t observation_bytes, action_bytes;
  uint64_t seed;
  char *options;
  char *path;
  char *message;
  int saves; /* true after DPPO_SAVE */
  uint32_t infos;
  dppo_number info[DPPO_MAX_INFO];
};

static void dppo_fail(const char *what, const char *detail) {
  fflush(stdout);
  fprintf(stderr, "dppo: %s%s%s\n", what, *detail ? ": " : "", detail);
  fflush(stderr);
#ifdef MPI_VERSION
  int started = 0;
  MPI_Initialized(&started);
  if (started) MPI_Abort(MPI_COMM_WORLD, 1);
#endif
  exit(1);
}

static void *dppo_allocate(size_t size) {
  void *memory = calloc(size + 1, 1);
  if (!memory) dppo_fail("no memory is left", "");
  return memory;
}

/* The numbers in all parts of a text such as "temperature[64] jets[2](0:1)". */
static size_t dppo_count(const char *parts) {
  size_t total = 0;
  const char *at = parts;
  while (*at) {
    while (*at == ' ') at++;
    if (!*at) break;
    size_t size = 1;
    while (*at && *at != ' ') {
      if (*at == '[' || *at == ',') {
        char *end;
        long length = strtol(at + 1, &end, 10);
        if (end == at + 1 || length < 1) dppo_fail("a shape is written as name[3] or name[3,16]", parts);
        size *= (size_t)length;
        at = end;
      } else if (*at == '(') {
        while (*at && *at != ')') at++;
      } else {
        at++;
      }
    }
    total += size;
  }
  if (!total) dppo_fail("a part is missing", "write such as \"temperature[64]\"");
  return total;
}

static int dppo_connected(const char *address) {
  if (!strncmp(address, "unix:", 5)) {
    struct sockaddr_un unix_address;
    memset(&unix_address, 0, sizeof unix_address);
    unix_address.sun_family = AF_UNIX;
    if (strlen(address + 5) >= sizeof unix_address.sun_path) dppo_fail("DPPO_ADDRESS is too long", address);
    strcpy(unix_address.sun_path, address + 5);
    int made = socket(AF_UNIX, SOCK_STREAM, 0);
    if (made < 0) return -1;
    if (!connect(made, (struct sockaddr *)&unix_address, sizeof unix_address)) return made;
    close(made);
    return -1;
  }
  const char *port = strrchr(address, ':');
  if (strncmp(address, "tcp:", 4) || port < address + 4)
    dppo_fail("DPPO_ADDRESS is unix:PATH or tcp:HOST:PORT, and not", address);
  char host[256];
  snprintf(host, sizeof host, "%.*s", (int)(port - address - 4), address + 4);
  struct addrinfo wanted, *answers;
  memset(&wanted, 0, sizeof wanted);
  wanted.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host, port + 1, &wanted, &answers)) return -1;
  int made = -1;
  for (struct addrinfo *answer = answers; answer && made < 0; answer = answer->ai_next) {
    made = socket(answer->ai_family, answer->ai_socktype, answer->ai_protocol);
    if (made >= 0 && connect(made, answer->ai_addr, answer->ai_addrlen)) {
      close(made);
      made = -1;
    }
  }
  freeaddrinfo(answers);
  if (made >= 0) {
    int on = 1;
    setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(made, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  }
  return made;
}

static int dppo_send(int to, const void *data, size_t size) {
  const char *at = (const char *)data;
  while (size) {
    ssize_t sent = send(to, at, size, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return 0;
    at += sent;
    size -= (size_t)sent;
  }
  return 1;
}

static int dppo_receive(int from, void *data, size_t size) {
  char *at = (char *)data;
  while (size) {
    ssize_t received = recv(from, at, size, 0);
    if (received < 0 && errno == EINTR) continue;
    if (received <= 0) return 0;
    at += received;
    size -= (size_t)received;
  }
  return 1;
}

dppo *dppo_open(int type, const char *observation, const char *action) {
  const char *address = getenv("DPPO_ADDRESS");
  const char *secret = getenv("DPPO_SECRET");
  const char *restart = type & DPPO_RESTART ? "restart=1\n" : "";
  type &= ~DPPO_RESTART;
  if (type != DPPO_FLOAT && type != DPPO_DOUBLE) dppo_fail("the type is DPPO_FLOAT or DPPO_DOUBLE", "");
  if (!address || !secret)
    dppo_fail("DPPO_ADDRESS and DPPO_SECRET are not set",
              "let dppo start this program (dppo train dppo.remote:make), or see docs/SOLVERS.md");
  dppo *d = (dppo *)dppo_allocate(sizeof *d);
  d->observation_bytes = dppo_count(observation) * (size_t)type;
  d->action_bytes = dppo_count(action) * (size_t)type;
  d->options = (char *)dppo_allocate(2);
  strcpy(d->options, "{}");
  d->path = (char *)dppo_allocate(1);
  d->message = (char *)dppo_allocate(sizeof(dppo_state) + d->observation_bytes + sizeof d->info);

  time_t until = time(NULL) + DPPO_WAIT_S;
  while ((d->socket = dppo_connected(address)) < 0) {
    if (time(NULL) > until) dppo_fail("nothing listens at DPPO_ADDRESS", address);
    struct timespec pause = {0, 100000000};
    nanosleep(&pause, NULL);
  }
  size_t length = strlen(secret) + strlen(observation) + strlen(action) + 64;
  char *text = (char *)dppo_allocate(length);
  snprintf(text, length, "secret=%s\nbytes=%d\nobservation=%s\naction=%s\n%s", secret, type, observation, action,
           restart);
  uint32_t opening[3] = {0x4f505044, DPPO_VERSION, (uint32_t)strlen(text)}; /* "DPPO" */
  uint32_t answer[3] = {0, 0, 0};
  struct timeval limit = {DPPO_WAIT_S, 0};
  setsockopt(d->socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  if (!dppo_send(d->socket, opening, sizeof opening) || !dppo_send(d->socket, text, strlen(text)) ||
      !dppo_receive(d->socket, answer, sizeof answer) || answer[0] != opening[0])
    dppo_fail("no answer, because another solver is connected there, or it is not dppo that listens", address);
  free(text);
  if (answer[2]) {
    char *reason = (char *)dppo_allocate(answer[2]);
    dppo_receive(d->socket, reason, answer[2]);
    dppo_fail("refused", reason);
  }
  limit.tv_sec = 0; /* an update may take long */
  setsockopt(d->socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  return d;
}

int dppo_step(dppo *d, const void *observation, double reward, int end, void *action) {
  dppo_state state = {(uint32_t)end, d->infos, reward};
  size_t info_bytes = d->infos * sizeof(dppo_number);
  char *at = d->message;
  memcpy(at, &state, sizeof state);
  at += sizeof state;
  if (observation) memcpy(at, observation, d->observation_bytes);
  at += d->observation_bytes;
  memcpy(at, d->info, info_bytes);
  at += info_bytes;
  d->infos = 0;
  dppo_reply reply;
  if (!dppo_send(d->socket, d->message, (size_t)(at - d->message)) ||
      !dppo_receive(d->socket, &reply, sizeof reply))
    return DPPO_STOP; /* dppo has ended */
  if (reply.kind == DPPO_ACT) {
    if (reply.size != d->action_bytes) dppo_fail("an action has another size than was agreed", "");
    return dppo_receive(d->socket, action, reply.size) ? DPPO_ACT : DPPO_STOP;
  }
  if (reply.kind != DPPO_RESET && reply.kind != DPPO_SAVE && reply.kind != DPPO_LOAD) return DPPO_STOP;
  char **text = reply.kind == DPPO_RESET ? &d->options : &d->path;
  free(*text);
  *text = (char *)dppo_allocate(reply.size);
  if (!dppo_receive(d->socket, *text, reply.size)) return DPPO_STOP;
  if (reply.kind == DPPO_RESET) d->seed = reply.seed;
  return (int)reply.kind;
}

unsigned long long dppo_seed(const dppo *d) { return d->seed; }

const char *dppo_options(const dppo *d) { return d->options; }

const char *dppo_path(const dppo *d) { return d->path; }

void dppo_info(dppo *d, const char *name, double value) {
  if (d->infos == DPPO_MAX_INFO) dppo_fail("more than 32 numbers of info in a step", name);
  if (strlen(name) >= DPPO_NAME) dppo_fail("the name of an info has more than 31 characters", name);
  dppo_number *number = &d->info[d->infos++];
  memset(number, 0, sizeof *number);
  strcpy(number->name, name);
  number->value = value;
}

void dppo_close(dppo *d) {
  if (d->socket >= 0) close(d->socket);
  free(d->options);
  free(d->path);
  free(d->message);
  free(d);
}

#ifdef MPI_VERSION
dppo *dppo_open_all(int type, const char *observation, const char *action, MPI_Comm ranks) {
  int rank, started;
  const char *wanted = getenv("DPPO_RANKS");
  MPI_Comm_size(MPI_COMM_WORLD, &started);
  if (wanted && started == 1 && atoi(wanted) > 1)
    dppo_fail("MPI started each rank as a program of its own",
              "compile it with the mpicc that belongs to the mpirun in PATH; with srun, set SLURM_MPI_TYPE to pmix for "
              "Open MPI, to pmi2 for MPICH");
  MPI_Comm_rank(ranks, &rank);
  if (rank == 0) return dppo_open(type, observation, action);
  dppo *d = (dppo *)dppo_allocate(sizeof *d);
  d->socket = -1;
  d->action_bytes = dppo_count(action) * (size_t)(type & ~DPPO_RESTART);
  d->options = (char *)dppo_allocate(2);
  strcpy(d->options, "{}");
  d->path = (char *)dppo_allocate(1);
  return d;
}

/* Broadcast from rank 0 to ranks that leave their core to others while they wait: MPI_Bcast would keep it busy. */
static void dppo_broadcast(void *data, size_t size, MPI_Comm ranks) {
  if (!getenv("DPPO_NAP")) {
    MPI_Bcast(data, (int)size, MPI_BYTE, 0, ranks);
    return;
  }
  MPI_Request request;
  MPI_Ibcast(data, (int)size, MPI_BYTE, 0, ranks, &request);
  struct timespec nap = {0, DPPO_SHORTEST_NAP_NS};
  for (;;) {
    int done = 0;
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done) return;
    nanosleep(&nap, NULL);
    if (nap.tv_nsec < DPPO_LONGEST_NAP_NS) nap.tv_nsec += nap.tv_nsec / 8;
  }
}

/* `observation`, `reward` and `end` are those of rank 0. */
int dppo_step_all(dppo *d, const void *observation, double reward, int end, void *action, MPI_Comm ranks) {
  int rank;
  uint64_t header[3]; /* the reply, the seed, the length of the options or path */
  MPI_Comm_rank(ranks, &rank);
  if (d->saves) MPI_Barrier(ranks); /* the state is complete when every rank has written its part */
  if (rank == 0) {
    header[0] = (uint64_t)dppo_step(d, observation, reward, end, action);
    header[1] = d->seed;
    header[2] = strlen(header[0] == DPPO_RESET ? d->options : d->path);
  }
  dppo_broadcast(header, sizeof header, ranks);
  if (header[0] == DPPO_ACT) dppo_broadcast(action, d->action_bytes, ranks);
  if (header[0] == DPPO_RESET) d->seed = header[1];
  if (header[0] != DPPO_ACT && header[0] != DPPO_STOP) {
    char **text = header[0] == DPPO_RESET ? &d->options : &d->path;
    if (rank) {
      free(*text);
      *text = (char *)dppo_allocate(header[2]);
    }
    dppo_broadcast(*text, header[2], ranks);
  }
  d->saves = header[0] == DPPO_SAVE;
  return (int)header[0];
}
#endif

/* For dppo_module.f90, whose communicators are numbers. */
#ifdef MPI_VERSION
dppo *dppo_open_all_fortran(int type, const char *observation, const char *action, int ranks) {
  return dppo_open_all(type, observation, action, MPI_Comm_f2c((MPI_Fint)ranks));
}

int dppo_step_all_fortran(dppo *d, const void *observation, double reward, int end, void *action, int ranks) {
  return dppo_step_all(d, observation, reward, end, action, MPI_Comm_f2c((MPI_Fint)ranks));
}
#else
dppo *dppo_open_all_fortran(int type, const char *observation, const char *action, int ranks) {
  (void)ranks;
  dppo_fail("dppo.h was compiled without MPI", "compile it with mpicc and -include mpi.h");
  return dppo_open(type, observation, action);
}

int dppo_step_all_fortran(dppo *d, const void *observation, double reward, int end, void *action, int ranks) {
  (void)ranks;
  return dppo_step(d, observation, reward, end, action);
}
#endif

#endif /* DPPO_IMPLEMENTATION */
