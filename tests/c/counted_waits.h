/* counted_waits.h: counts the extension's waits for condition variables, so that a test knows
 * when a thread waits. run.sh links every test so that its calls of pthread_cond_wait come here. */
#ifndef COUNTED_WAITS_H
#define COUNTED_WAITS_H

/* How many waits have begun in this process. */
unsigned long waits_begun(void);

#endif
