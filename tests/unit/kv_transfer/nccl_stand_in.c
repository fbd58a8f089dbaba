// A stand-in for NCCL's library between two processes of one host, over a socket: the functions that nccl_library.py calls.
//
// A communicator has a thread, which is what its GPU's stream would be: it connects, then moves one buffer after the other.
// Calls return at once and are in progress for STAND_IN_DELAY_US, as NCCL's are. What is on its way is bounded by the socket's
// buffers. A lost peer is an error, and what was to be moved then never is; an abort ends it all without one. Memory is the
// processor's, and a stream counts what was put on it and what is done (stand_in_stream, _queued, _is_done).
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { MOST_OPERATIONS = 64, FIFO_BYTES = 1 << 16, LOOK_MS = 5, MOST_IDS = 1024 };

typedef struct { char internal[128]; } unique_id;
typedef struct { size_t size; unsigned magic, version; int blocking; } config;
typedef struct { atomic_long queued, done; } stream;
typedef struct { char *at; size_t left; int sends; stream *on; } operation;
typedef struct {
  pthread_t thread;
  pthread_mutex_t lock;
  int rank, port, fd;
  atomic_int state, aborted;
  operation queue[MOST_OPERATIONS];
  int first, count;
} communicator;

static int listeners[MOST_IDS], ports[MOST_IDS], num_listeners;  // of the ids that this process made
static pthread_mutex_t listeners_lock = PTHREAD_MUTEX_INITIALIZER;

static void delay(void) {
  const char *us = getenv("STAND_IN_DELAY_US");
  if (us) usleep(atoi(us));
}

static void bound(int fd) {
  int size = FIFO_BYTES;
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
  setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
}

static struct sockaddr_in local(int port) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
  return at;
}

static int listener_of(int port) {
  int found = -1;
  pthread_mutex_lock(&listeners_lock);
  for (int i = 0; i < num_listeners; ++i)
    if (ports[i] == port) found = listeners[i], ports[i] = 0;
  pthread_mutex_unlock(&listeners_lock);
  return found;
}

// Until the socket can be read or written; false after an abort.
static int ready(communicator *c, int fd, short events) {
  struct pollfd one = {fd, events, 0};
  while (!c->aborted)
    if (poll(&one, 1, LOOK_MS) > 0) return 1;
  return 0;
}

// All of a buffer. False after an abort, and with an error as the state where the peer is gone.
static int moved(communicator *c, operation *it) {
  while (it->left) {
    if (!ready(c, c->fd, it->sends ? POLLOUT : POLLIN)) return 0;
    ssize_t n = it->sends ? send(c->fd, it->at, it->left, MSG_NOSIGNAL) : recv(c->fd, it->at, it->left, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) {
      c->state = REMOTE_ERROR;
      return 0;
    }
    it->at += n, it->left -= n;
  }
  return 1;
}

// Rank 0, which has made the id, accepts; rank 1 connects. Both are there when each has had a byte of the other.
static int connected(communicator *c) {
  struct sockaddr_in at = local(c->port);
  if (c->rank == 0) {
    int listener = listener_of(c->port);
    if (ready(c, listener, POLLIN)) c->fd = accept(listener, NULL, NULL);
    close(listener);
  } else {
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    bound(c->fd);
    if (connect(c->fd, (struct sockaddr *)&at, sizeof at)) c->state = SYSTEM_ERROR;
  }
  if (c->aborted || c->fd < 0 || c->state != IN_PROGRESS) return 0;
  fcntl(c->fd, F_SETFL, O_NONBLOCK);
  char mine = 'a' + c->rank, theirs = 0;
  operation hello = {&mine, 1, 1, NULL}, answer = {&theirs, 1, 0, NULL};
  if (!moved(c, &hello) || !moved(c, &answer)) return 0;
  if (theirs + mine != 'a' + 'b') c->state = INVALID_ARGUMENT;
  return c->state == IN_PROGRESS;
}

static int next(communicator *c, operation *it) {
  pthread_mutex_lock(&c->lock);
  int found = c->count > 0;
  if (found) *it = c->queue[c->first], c->first = (c->first + 1) % MOST_OPERATIONS, --c->count;
  pthread_mutex_unlock(&c->lock);
  return found;
}

static void *work(void *given) {
  communicator *c = given;
  operation it;
  delay();
  int lives = connected(c);
  if (lives) c->state = SUCCESS;
  while (lives && !c->aborted) {
    if (!next(c, &it)) {
      usleep(50);
      continue;
    }
    delay();
    int begun = IN_PROGRESS;
    atomic_compare_exchange_strong(&c->state, &begun, SUCCESS);
    lives = moved(c, &it);
    if (lives || c->aborted) ++it.on->done;
  }
  while (!c->aborted) usleep(1000);
  while (next(c, &it)) ++it.on->done;
  if (c->fd >= 0) close(c->fd);
  return NULL;
}

static int begin(void *buffer, size_t count, int type, int peer, communicator *c, stream *on, int sends) {
  if (type != 1 || peer != 1 - c->rank) return INVALID_ARGUMENT;
  if (c->state != SUCCESS) return c->state;
  pthread_mutex_lock(&c->lock);
  int fits = c->count < MOST_OPERATIONS;
  if (fits) {
    operation it = {buffer, count, sends, on};
    c->state = IN_PROGRESS;
    c->queue[(c->first + c->count++) % MOST_OPERATIONS] = it;
    ++on->queued;
  }
  pthread_mutex_unlock(&c->lock);
  return fits ? IN_PROGRESS : SYSTEM_ERROR;
}

int ncclGetVersion(int *version) { return *version = 22801, SUCCESS; }

const char *ncclGetErrorString(int result) {
  return result == REMOTE_ERROR ? "remote process exited or there was a network error"
         : result == INVALID_ARGUMENT ? "invalid argument" : "unhandled system error";
}

int ncclGetUniqueId(unique_id *id) {
  struct sockaddr_in at = local(0);
  socklen_t size = sizeof at;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  bound(fd);
  if (bind(fd, (struct sockaddr *)&at, size) || listen(fd, 1) || getsockname(fd, (struct sockaddr *)&at, &size)) return SYSTEM_ERROR;
  memset(id, 0, sizeof *id);
  int port = ntohs(at.sin_port);
  memcpy(id, &port, sizeof port);
  pthread_mutex_lock(&listeners_lock);
  listeners[num_listeners] = fd, ports[num_listeners++] = port;
  pthread_mutex_unlock(&listeners_lock);
  return SUCCESS;
}

int ncclCommInitRankConfig(communicator **made, int ranks, unique_id id, int rank, config *wanted) {
  if (ranks != 2 || wanted->size != sizeof *wanted || wanted->magic != 0xCAFEBEEF || wanted->blocking) return INVALID_ARGUMENT;
  communicator *c = *made = calloc(1, sizeof *c);
  pthread_mutex_init(&c->lock, NULL);
  c->rank = rank, c->fd = -1, c->state = IN_PROGRESS;
  memcpy(&c->port, &id, sizeof c->port);
  return pthread_create(&c->thread, NULL, work, c) ? SYSTEM_ERROR : IN_PROGRESS;
}

int ncclCommGetAsyncError(communicator *c, int *state) { return *state = c->state, SUCCESS; }

int ncclSend(void *from, size_t count, int type, int peer, communicator *c, stream *on) { return begin(from, count, type, peer, c, on, 1); }

int ncclRecv(void *into, size_t count, int type, int peer, communicator *c, stream *on) { return begin(into, count, type, peer, c, on, 0); }

int ncclCommAbort(communicator *c) {
  c->aborted = 1;
  pthread_join(c->thread, NULL);
  free(c);
  return SUCCESS;
}

stream *stand_in_stream(void) { return calloc(1, sizeof(stream)); }

long stand_in_queued(stream *it) { return it->queued; }

int stand_in_is_done(stream *it, long place) { return it->done >= place; }
