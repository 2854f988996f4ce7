/*
 * The life of one key whose claims are locks, beside claims that are records.
 *
 * Requests 1 and 2 are the same, request 3 has another body. Each is by lock or by record, as it comes. Each atomic block
 * is one step that PostgreSQL takes by itself; a call of a function is several. docs/evidence/correctness.md maps them to the code.
 * The life of a record is that of claim.pml, and is kept short here: its run is one step.
 * A worker that is killed is rolled back at once: until the server notices, its locks are those of a live owner.
 *
 * -DREPEATABLE: the isolation REPEATABLE READ, where a look may be older than the locks.
 * -DNO_INDEX: a partitioned table, where no index makes a key unique.
 * A mutant is built with one more -D and must break a law.
 */

#ifndef REQUESTS
#define REQUESTS 3
#endif
#ifndef TROUBLES
#define TROUBLES 2	/* of any kind: see the view, and COMMIT */
#endif
#define SESSIONS 6	/* from 1 on; who lost one goes on in another */

mtype = { ABSENT, PROCESSING, COMPLETED };

/* The record, as it is committed */
mtype status = ABSENT;
byte stored = 0;	/* whose response */
bit body = 0;		/* of which body */
byte row_owner = 0;	/* the run of the record that is at work */

/* What the server has locked, by session */
byte key_lock = 0;	/* exclusive */
byte key_shares = 0;
byte request_lock[2];
byte claiming = 0;	/* the lock under which records are claimed one after the other */
bit running[SESSIONS];	/* its transaction has not ended: it has its virtual transaction locked */
byte committing[SESSIONS];	/* COMMIT has arrived, of this run, and nobody waits for the answer */
bit body_of[SESSIONS];

/* What the world knows */
byte sessions = REQUESTS, runs = 0;
byte at_work = 0;	/* runs whose transaction has not ended */
byte effects = 0;	/* runs whose effects are committed, and not released */
byte told = 0, answered = 0;
byte troubles = 0;

#ifdef REPEATABLE
#define BEGINS skip
#else
#define BEGINS assert(at_work == 0)	/* L6: no run begins while another lives */
#endif
#ifdef NO_INDEX
#define UNIQUE 1
#else
#define UNIQUE (status == ABSENT)
#endif
#ifdef NO_NUMBER
#define SAME_TRANSACTION 1
#else
#define SAME_TRANSACTION (!ended)
#endif

inline tell(response) {
	assert(told == 0 || told == response);	/* L2 */
	told = response
}

inline commit(session, by) {	/* the effects, the record, and the end of the transaction are one */
	effects++;
	assert(effects <= 1);	/* L1 */
	status = COMPLETED; stored = by; body = body_of[session];
	running[session] = 0; at_work--
}

inline another_session() { sessions++; me = sessions; body_of[me] = mine }

inline see() { seen = status; seen_stored = stored; seen_body = body }

#define FREE (key_lock != me && request_lock[mine] != me)
#define GIVE_UP running[me] = 0; FREE

proctype Request(byte me; bit mine) {
	mtype seen; byte seen_stored, this, before; bit seen_body, ended, owned, same, other;

retry:
	atomic {
		this = 0; before = 0; ended = 0; same = 0; other = 0; owned = 0; seen = 0; seen_stored = 0; seen_body = 0;
		body_of[me] = mine
	}
	if
	:: goto by_lock
#ifndef ONLY_LOCKS
	:: goto by_record
#endif
	fi;

by_lock: /* LockClaimStore._lock_and_read, in the business transaction */
	atomic {
		running[me] = 1;
#if defined(REPEATABLE) || defined(LOOK_FIRST)
		see()
#endif
	}
	atomic {
#ifdef NO_REQUEST_LOCK
		skip
#else
		if
		:: request_lock[mine] == 0 -> request_lock[mine] = me
		:: else -> same = 1
		fi
#endif
	}
	atomic {
		if
#ifdef NO_KEY_LOCK
		:: !same && key_lock == 0 -> key_lock = me
		:: else
#else
		:: !same && key_lock == 0 && key_shares == 0 -> key_lock = me
		:: !same && (key_lock != 0 || key_shares != 0) -> other = 1
		:: same
#endif
		fi
	}
#if !defined(REPEATABLE) && !defined(LOOK_FIRST)
	atomic { see() }
#endif
	if
	:: seen == COMPLETED -> GIVE_UP; goto found
	:: seen == PROCESSING -> GIVE_UP; goto take_over
	:: seen == ABSENT && same -> GIVE_UP; goto retry	/* 409 */
	:: seen == ABSENT && other ->
		atomic {	/* a look at pg_locks */
			if
#ifdef NO_LOOK_AT_OWNER
			:: key_lock != 0 -> assert(body_of[key_lock] != mine); owned = 1	/* L10 */
#else
			:: key_lock != 0 && running[key_lock] -> assert(body_of[key_lock] != mine); owned = 1	/* L10 */
#endif
			:: else
			fi
		}
		GIVE_UP;
		if
		:: owned -> goto done	/* 422 */
		:: else -> goto retry
		fi
	:: seen == ABSENT && !same && !other
	fi;
	atomic { BEGINS; at_work++; runs++; this = runs }

	/* The view */
	if
	:: atomic { troubles < TROUBLES -> troubles++; running[me] = 0; at_work--; another_session() }	/* killed */
		goto retry
	:: atomic { troubles < TROUBLES -> troubles++; running[me] = 0; at_work-- }	/* raises, or what it returns is not stored */
		FREE; goto retry
	:: atomic { troubles < TROUBLES -> troubles++; running[me] = 0; at_work--; ended = 1 }	/* rolls back past Django */
		FREE
	:: skip
	fi;

	/* INSERT, in the transaction of the claim, and COMMIT */
	if
	:: !SAME_TRANSACTION -> goto retry	/* TransactionEnded: 500, and nothing is stored */
	:: atomic { SAME_TRANSACTION && ended -> status = COMPLETED; stored = this; body = mine; tell(this); goto done }
	:: SAME_TRANSACTION && !ended
	fi;
	if
	:: atomic { UNIQUE -> skip }
	:: atomic { !UNIQUE -> running[me] = 0; at_work-- }	/* lost: rolled back */
		FREE; goto retry
	fi;
	if
	:: atomic { UNIQUE -> commit(me, this) }
		FREE; atomic { tell(this); goto done }
	:: atomic { !UNIQUE -> running[me] = 0; at_work-- }	/* the index has made it wait for the other */
		FREE; goto retry
	:: atomic { troubles < TROUBLES -> troubles++; running[me] = 0; at_work--; another_session() }
		goto retry
	:: atomic { UNIQUE && troubles < TROUBLES -> troubles++;
		if
		:: committing[me] = this	/* the server is at it */
		:: running[me] = 0; at_work--	/* COMMIT never arrived */
		fi;
		before = me; another_session() }
	fi;

look_again: /* LockClaimStore.read_after_commit */
	atomic { see() }
#ifndef LOOK_WITHOUT_LOCKS
	key_lock == 0 && request_lock[mine] == 0;	/* had for a moment */
#endif
#ifndef LOOK_ONCE
	atomic { see() }	/* with a snapshot of its own; at REPEATABLE READ by asking again */
#endif
	if
	:: seen == COMPLETED && seen_stored == this -> atomic { tell(this); goto done }
	:: seen == COMPLETED && seen_stored != this -> goto found
	:: else -> atomic { assert(committing[before] == 0 && stored != this); goto retry }	/* L8: nothing is committed */
	fi;

by_record: /* django_idempotency_claim, in autocommit */
	atomic { claiming == 0 -> claiming = me }
	atomic {
#ifdef RECORD_WITHOUT_LOCK
		skip
#else
		if
		:: key_lock == 0 -> key_shares++
		:: else -> owned = 1
		fi
#endif
	}
	atomic { see() }
#ifdef SHARE_ENDS_EARLY
	atomic { if :: !owned -> key_shares-- :: else fi }
#endif
	atomic {
		if
		:: seen == ABSENT && !owned -> status = PROCESSING; body = mine
		:: else
		fi
	}
	atomic {
		claiming = 0;
#if !defined(RECORD_WITHOUT_LOCK) && !defined(SHARE_ENDS_EARLY)
		if
		:: !owned -> key_shares--
		:: else
		fi
#endif
	}
	if
	:: seen == COMPLETED -> goto found
	:: seen == ABSENT && owned -> goto retry
	:: else
	fi;

take_over: /* whoever has the row runs: claim.pml */
	if
	:: atomic { status == PROCESSING && body != mine -> goto done }	/* 422 */
	:: atomic { status == PROCESSING && body == mine && row_owner == 0 ->
		row_owner = me; BEGINS; at_work++; runs++; this = runs }
	:: atomic { status == PROCESSING && body == mine && row_owner != 0 -> goto retry }	/* 409 */
	:: atomic { status != PROCESSING -> goto retry }
	fi;
	if
	:: atomic { troubles < TROUBLES -> troubles++; row_owner = 0; at_work-- }	/* killed, or raises */
	:: atomic { troubles < TROUBLES -> troubles++; row_owner = 0; at_work--; status = ABSENT }	/* released */
	:: atomic { row_owner == me -> row_owner = 0; commit(me, this) }
		atomic { tell(this); goto done }
	fi;
	goto retry;

found:	atomic {
		if
		:: seen_body == mine -> tell(seen_stored)
		:: else	/* 422 */
		fi
	}

done:	atomic {
		answered++;
		assert(effects == (stored != 0 -> 1 : 0))	/* L4 */
	}
}

/* The server: what an ended transaction has locked goes one by one, and a COMMIT that has arrived is done. */
#define ENDED(lock) (lock != 0 && !running[lock])

active proctype KeyLock() {
	do
	:: atomic { ENDED(key_lock) -> key_lock = 0 }
	:: answered == REQUESTS -> break
	od
}

active [2] proctype RequestLock() {
	bit of_body = _pid % 2;
	do
	:: atomic { ENDED(request_lock[of_body]) -> request_lock[of_body] = 0 }
	:: answered == REQUESTS -> break
	od
}

active proctype Commit() {
	byte i;
	do
	:: atomic {
		committing[1] != 0 || committing[2] != 0 || committing[3] != 0 || committing[4] != 0 -> i = 1;
		do
		:: committing[i] != 0 -> commit(i, committing[i]); committing[i] = 0; break
		:: else -> i++
		od
	}
	:: answered == REQUESTS -> break
	od
}

init {
	atomic {
		byte i = 1;
		do
		:: i <= REQUESTS -> run Request(i, (i == 3 -> 1 : 0)); i++
		:: else -> break
		od
	}
}

ltl ends { <> (answered == REQUESTS) }
