"""Environments and users' modules for tests. Actors import them by name: `worlds.acting:Masked`.

Bases
    episodic:Episodic                counts its steps; a reset calls `begin`
    episodic:Hashed                  follows from its seed and all actions

Spaces
    simple:PointMass, point_mass     a point to push, with and without a time limit
    simple:Counting                  observes its steps, rewards its action; ends or is cut off where it is told to
    simple:Wide                      observations of any size
    simple:Odd, changeable           spaces by name, some of them refused; from environment variables
    observed:World                   the base of those below: a point that drifts, episodes of up to 15 steps
    observed:Level, Plain            one space of a kind
    observed:Picture, Guarded, stacked, Film, Codes     images: plain, with masks, stacked, four at once, categories
    observed:Everything, Numbers     a Dict with a leaf of each kind; without images
    acting:Checked, Actuated         raises if an action is not in its space; an action space by name
    acting:Masked, Hybrid, Combined  masks of choices; choices beside floats; any observation with any action
    memory:Recalls, Pictured, Named  only memory helps; the same as an image and as a Dict
    joint:vector, four, Native       vectors of Gymnasium; one that resets its sub-environments by itself
    joint:Agents, agents, deadly     a parallel environment of three agents; one that kills its process

What they ask for
    asking:Numbered                  its number, a scratch folder and a render mode
    asking:Doubled, PlusOne, nothing wrappers; one that returns nothing
    drawn:Drawn, seeded              can be replayed and drawn, or not; needs a seed
    graded:Graded, Levels            options of its reset; an observer that changes them
    informed:Informed                numbers in the info of its steps
    licensed:Licensed                one of few licences
    single:Engine, Replaced, OnPort  one instance in a process; one at a place
    threaded:Threaded                one thread; several at a time

Faults
    faulty:CrashingSimulator, crashing, deadly     raises, hangs or dies at one place; dies at several
    faulty:DriftingSimulator         no seed reproduces it
    faulty:Brittle                   raises a user's exception, by place
    faulty:Faulty                    returns one invalid value in some episodes
    faulty:Unreliable                fails in a share of its steps; the seed decides in which
    sick:Sick, Saved                 one disease by name, for the doctor; with a state that can be set
    disturbing:Disturbing            changes the state of its process
    forking:Forking                  forks
    stateful:Hidden, Foreign, Arm, Clockless, Worn, Misleading   state that survives resets, and ways to get it wrong

Time
    slow:Delayed                     sleeps before each step
    slow:Endless                     one episode without an end
    slow:Hesitant, hesitant_cartpole waits, or presses Ctrl-C, while a file exists
    slow:Outside, outside_cartpole   has a process of its own
    slow:Reporting                   reports about its process
    slow:slow_in_one_process         is slow in one of several actors

Networks
    models:Plain, Residual           keep the contract; each of the others breaks one part of it
    memory_models:Running            the same with memory
"""
