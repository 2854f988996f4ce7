/*
 * The life of one key: requests that retry, workers that crash or freeze, a reaper.
 *
 * -DMODE=ATOMIC, -DMODE=LEASE (on_crash="retry") or -DMODE=HOLD (lease mode, on_crash="hold"). A mutant is built with
 * one more -D and must break a law. Each atomic block is one statement, or one COMMIT, of the real thing:
 * docs/correctness.md maps the steps to the code.
 */

#define ATOMIC 0
#define LEASE 1
#define HOLD 2
#ifndef MODE
#define MODE ATOMIC
#endif

#define REQUESTS 3	/* concurrent requests with one key */
#define CRASHES 2	/* workers that die */
#define FREEZES 1	/* workers that are stopped past their lease, and continued */
#define RAISES 1	/* views that raise, or answer what is not stored */
#define CUTS 1		/* answers, of COMMIT or to the client, that are lost */
#define LATES 1		/* holders so slow to lock their row that the grace has passed */

mtype = { ABSENT, PROCESSING, COMPLETED, FAILED, HELD };

/* The record */
mtype status = ABSENT;
byte token = 0;		/* 0: none; never used again */
byte attempts = 0;	/* starts again at 1 when a released key comes back: what a mutant fences by */
byte owner = 0;		/* who has the row lock */
byte stored = 0;	/* whose answer is stored, by token */
bit expired = 0;	/* the lease has run out */

/* What the world knows */
byte tokens = 0;
bit alive = 0;		/* the holder's process lives */
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
#define RAN_OUT (MODE != ATOMIC && status == PROCESSING && expired)

inline hand_over() {	/* a new claim, or a claim that changes hands under the row lock */
	tokens++;
	mine = tokens; token = mine; round = attempts + 1; attempts = round;
	status = PROCESSING; alive = 1; expired = 0
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
		mine = 0; round = 0;
		if
		:: status == ABSENT -> hand_over()
		:: status == COMPLETED -> tell(stored); goto done
		:: status == HELD -> goto done
		:: status == FAILED && UNLOCKED -> hand_over()
		:: MODE == ATOMIC && status == PROCESSING && UNLOCKED && !alive -> hand_over()
		:: MODE == ATOMIC && status == PROCESSING && UNLOCKED && alive && lates < LATES -> lates++; hand_over()
		:: RAN_OUT && MODE == HOLD -> status = HELD; token = 0; goto done
		:: RAN_OUT && MODE == LEASE -> hand_over()
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
	:: atomic { freezes < FREEZES -> freezes++; expired = 1 }
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
		if
		:: MINE ->
			assert(token == mine);	/* L5 */
			status = COMPLETED; stored = mine; token = 0;
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
		owner = (owner == me -> 0 : owner);
		if
		:: MINE -> assert(token == mine); forget()
		:: else
		fi
	}
	goto retry;

raised:	/* roll back; then leave the record to a retry, if it is still ours */
	atomic { owner = (owner == me -> 0 : owner); alive = (token == mine -> 0 : alive) }
	atomic {
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

active proctype Reaper() {	/* two passes; what is locked is passed over */
	byte passes = 0;
	do
	:: atomic {
		passes < 2 -> passes++;
		if
#ifdef AGE_ONLY_REAPER
		:: status == PROCESSING -> assert(MODE != ATOMIC || UNLOCKED || !alive); status = FAILED; token = 0
#else
		:: status == PROCESSING && UNLOCKED && (MODE == ATOMIC -> !alive : expired) ->
			status = (MODE == HOLD -> HELD : FAILED); token = 0
#endif
		:: else
		fi
	}
	:: passes == 2 -> break
	od
}

active proctype Clock() {	/* the lease of a dead holder runs out; a live one's is renewed */
	do
	:: atomic { MODE != ATOMIC && status == PROCESSING && !alive && !expired -> expired = 1 }
	:: answered == REQUESTS -> break
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
