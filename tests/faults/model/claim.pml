/*
 * The life of one key: requests that retry, workers that crash or freeze, a reaper.
 *
 * -DMODE=ATOMIC, -DMODE=LEASE (on_crash="retry") or -DMODE=HOLD (lease mode, on_crash="hold"). A mutant is built with
 * one more -D and must break a law. Each atomic block is one statement, or one COMMIT, of the real thing:
 * docs/evidence/correctness.md maps the steps to the code.
 */

#define ATOMIC 0
#define LEASE 1
#define HOLD 2
#ifndef MODE
#define MODE ATOMIC
#endif

#ifndef REQUESTS
#define REQUESTS 3	/* concurrent requests with one key */
#endif
#define CRASHES 2	/* workers that die */
#define FREEZES 1	/* workers that are stopped past their lease, and continued */
#define RAISES 1	/* views that raise, or answer what is not stored */
#define CUTS 1		/* answers, of COMMIT or to the client, that are lost */
#ifndef OUTAGES
#define OUTAGES 2	/* times that the store is away, outside atomic mode: long enough for any lease to lapse */
#endif
#define LATES 1		/* holders so slow to lock their row that the grace has passed */

mtype = { ABSENT, PROCESSING, COMPLETED, FAILED, HELD };

/* The record */
mtype status = ABSENT;
byte token = 0;		/* 0: none; never used again */
byte attempts = 0;	/* starts again at 1 when a released key comes back: what a mutant fences by */
byte owner = 0;		/* who has the row lock */
byte stored = 0;	/* whose answer is stored, by token */
bit lapsed = 0;		/* the lease has run out */
bit expired = 0;	/* somebody has watched that, with the store there, for a heartbeat's time */

/* What the world knows */
byte tokens = 0;
bit alive = 0;		/* the holder's process lives: it runs, or has a verdict that is not written yet */
bit frozen = 0;		/* but it is stopped, and renews nothing */
bit excused = 0;	/* it was stopped since its last heartbeat: nobody can know of it */
bit up = 1;		/* the store is there */
bit beaten = 1;		/* and has been for a heartbeat's time */
byte outages = 0;
byte effects = 0;	/* executions whose effects are committed */
byte told = 0;		/* the first answer that a client got */
byte answered = 0;
byte crashes = 0, freezes = 0, raises = 0, cuts = 0, lates = 0;

#if defined(NO_FENCE)
#define MINE (status == PROCESSING)
#elif defined(COUNTER_FENCE)
#define MINE (status == PROCESSING && attempts == round)
#else
#define MINE (token == mine)
#endif

#define UNLOCKED (owner == 0)
#if defined(NO_WATCH)
#define RAN_OUT (MODE != ATOMIC && status == PROCESSING && lapsed)
#else
#define RAN_OUT (MODE != ATOMIC && status == PROCESSING && expired)
#endif
#define OVERTAKES assert(!alive || excused)	/* L6: no run begins while another lives whose store was reachable */

inline hand_over() {	/* a new claim, or a claim that changes hands under the row lock */
	tokens++;
	mine = tokens; token = mine; round = attempts + 1; attempts = round;
	status = PROCESSING; alive = 1; frozen = 0; excused = 0; lapsed = 0; expired = 0
}

inline forget() { status = ABSENT; token = 0; attempts = 0 }

inline tell(answer) {
	assert(told == 0 || told == answer);	/* L2, L5: one answer for all */
	told = answer
}

inline commit_effects() {
	effects++;
	assert(MODE == LEASE || effects <= 1)	/* L1; lease mode with on_crash="retry" may run again, and says so */
}

proctype Request(byte me) {
	byte mine, round;

retry:	/* engine.claim: decide; change hands under select_for_update */
	atomic {
		up; mine = 0; round = 0;
		if
		:: status == ABSENT -> hand_over()
		:: status == COMPLETED -> tell(stored); goto done
		:: status == HELD -> goto done
		:: status == FAILED && UNLOCKED -> hand_over()
		:: MODE == ATOMIC && status == PROCESSING && UNLOCKED && !alive -> hand_over()
		:: MODE == ATOMIC && status == PROCESSING && UNLOCKED && alive && lates < LATES -> lates++; hand_over()
		:: RAN_OUT && MODE == HOLD -> OVERTAKES; status = HELD; token = 0; goto done
		:: RAN_OUT && MODE == LEASE -> OVERTAKES; hand_over()
#ifdef TAKEOVER_WITHOUT_LOCK
		:: MODE == ATOMIC && status == PROCESSING && !UNLOCKED -> assert(!alive); hand_over()	/* L6 */
#endif
#ifdef WAITER_DELETES
		:: status == PROCESSING -> forget(); goto retry
#endif
		:: else -> goto retry	/* 409 in flight */
		fi
	}
	if
	:: atomic { crashes < CRASHES -> crashes++; alive = (token == mine -> 0 : alive); goto retry }
	:: skip
	fi;

	/* stores.lock: the business transaction opens with the row lock and looks at the token */
	if
	:: MODE == ATOMIC ->
		atomic {
			UNLOCKED;
			if
			:: MINE -> owner = me; assert(token == mine)	/* L5 */
			:: else -> goto retry
			fi
		}
	:: else
	fi;

	if
	:: atomic { raises < RAISES -> raises++; goto released }
	:: skip
	fi;

	/* The view. Outside atomic mode its effects are in the world at once. */
	if
	:: MODE != ATOMIC -> atomic { commit_effects() }
	:: else
	fi;
	if
	:: atomic { crashes < CRASHES -> crashes++; goto crashed }
	:: atomic { MODE != ATOMIC && freezes < FREEZES && token == mine -> freezes++; frozen = 1; excused = 1 };
		if
		:: atomic { frozen && token == mine -> frozen = 0 }
		:: token != mine
		fi
	:: atomic { MODE == ATOMIC && raises < RAISES -> raises++; goto raised }
	:: skip
	fi;

	/* stores.complete, and COMMIT */
#ifdef COMPLETE_OUTSIDE
	if
	:: MODE == ATOMIC -> atomic { commit_effects(); owner = 0 };
		if
		:: atomic { crashes < CRASHES -> crashes++; goto crashed }
		:: skip
		fi
	:: else
	fi;
#endif
#ifdef RELEASE_ON_ERROR
	if
	:: atomic { MODE != ATOMIC && cuts < CUTS -> cuts++; forget(); goto retry }
	:: skip
	fi;
#endif
	atomic {
		up;
		if
		:: MINE ->
			assert(token == mine);	/* L5 */
			status = COMPLETED; alive = 0; stored = mine; token = 0;
#ifndef COMPLETE_OUTSIDE
			if
			:: MODE == ATOMIC -> commit_effects()
			:: else
			fi;
#endif
			owner = (owner == me -> 0 : owner);
		:: else -> owner = (owner == me -> 0 : owner); goto retry
		fi
	}
	if
	:: atomic { crashes < CRASHES -> crashes++; goto retry }
	:: atomic { cuts < CUTS -> cuts++; assert(status == COMPLETED); goto retry }	/* engine._resolve_commit */
	:: atomic { tell(mine); assert(status == COMPLETED); assert(effects >= 1); goto done }	/* L3 */
	fi;

released: /* the answer is not to be stored: forget the key, if it is still ours */
	atomic {
		up; owner = (owner == me -> 0 : owner);
		if
		:: MINE -> assert(token == mine); forget(); alive = 0
		:: else
		fi
	}
	goto retry;

raised:	/* roll back; then leave the record to a retry, if it is still ours */
	atomic { owner = (owner == me -> 0 : owner); alive = (token == mine -> 0 : alive) }
	atomic {
		up;
		if
		:: MINE -> assert(token == mine); status = FAILED; token = 0
		:: else
		fi
	}
	goto retry;

crashed: /* the server rolls back and frees the row; nobody writes the record */
	atomic { owner = (owner == me -> 0 : owner); alive = (token == mine -> 0 : alive) }
	goto retry;

done:	atomic {
		answered++;
		assert(MODE != ATOMIC || effects == (stored != 0 -> 1 : 0))	/* L4: no effects without their answer */
	}
}

#ifdef REAPER_WITHOUT_WATCH
#define REAPABLE lapsed
#else
#define REAPABLE expired
#endif

active proctype Reaper() {	/* two passes; what is locked is passed over */
	byte passes = 0;
	do
	:: atomic {
		passes < 2 && up -> passes++;
		if
#ifdef AGE_ONLY_REAPER
		:: status == PROCESSING -> assert(MODE != ATOMIC || UNLOCKED || !alive); status = FAILED; token = 0
#else
		:: status == PROCESSING && UNLOCKED && (MODE == ATOMIC -> !alive : REAPABLE) ->
			if
			:: MODE != ATOMIC -> OVERTAKES
			:: else
			fi;
			status = (MODE == HOLD -> HELD : FAILED); token = 0
#endif
		:: else
		fi
	}
	:: passes == 2 -> break
	od
}

#define LIVE_LEASE (MODE != ATOMIC && status == PROCESSING)

active proctype Clock() {	/* a lease lapses when its holder is dead or stopped, or the store has been away */
	do
	:: atomic { LIVE_LEASE && !lapsed && (!alive || frozen || !up) -> lapsed = 1 }
	:: answered == REQUESTS -> break
	od
}

active proctype Heartbeat() {	/* a heartbeat's time passes: a holder that lives, and is not stopped, has renewed */
	do
	:: atomic {
		LIVE_LEASE && up && (!beaten || lapsed || expired) -> beaten = 1;
#ifndef SLOW_HEARTBEAT
		if
		:: alive && !frozen -> lapsed = 0; expired = 0; excused = 0
		:: else
		fi
#endif
	}
	:: answered == REQUESTS -> break
	od
}

active proctype Watch() {	/* engine.leases: who has seen the store there for a heartbeat's time, and the lease lapsed */
	do
	:: atomic { LIVE_LEASE && up && beaten && lapsed && !expired -> expired = 1 }
	:: answered == REQUESTS -> break
	od
}

active proctype Store() {
	do
	:: atomic { MODE != ATOMIC && up && outages < OUTAGES -> outages++; up = 0;
#ifndef WATCH_SURVIVES_OUTAGE
		beaten = 0
#endif
	}
	:: !up -> up = 1
	:: up && (outages == OUTAGES || MODE == ATOMIC || answered == REQUESTS) -> break
	od
}

init {
	atomic {
		byte i = 1;
		do
		:: i <= REQUESTS -> run Request(i); i++
		:: else -> break
		od
	}
}

ltl ends { <> (answered == REQUESTS) }
