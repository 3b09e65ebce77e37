"""Sentences that fit any issue, for the manner of an answer: questions, openings, stances, closings, calls to action.

``writing`` chooses among them. Braces are filled with the words of an issue and of a short story: {do}, {doing} and
{thing} name the proposal, {middle} a compromise, {unknown} and {asked} open questions, {pro} and {con} reasons, {gains}
and {loses} the people affected, {money} a sum, {percent}, {points}, {count}, {weeks} and {years} numbers, {day} a day
of the week, {other} another town. Phrases start in lower case unless they must not; ``writing`` adds capitals and full
stops.
"""

STANCES = ("for", "against", "compromise", "undecided")
TONES = ("warm", "plain", "formal", "blunt")
HEDGES = ("firm", "even", "hedged")
SUPPORTS = ("none", "figures", "story", "fairness", "cost")


LEADS = {
    "warm": (
        "dear neighbours and friends, ",
        "with love and gratitude to all of you, ",
        "thank you all so kindly for listening, dear friends, and ",
        "with a warm heart and a big hug for everyone, ",
        "it is lovely that we talk about this together, and ",
        "bless you all for coming tonight, and ",
    ),
    "plain": ("",),
    "formal": (
        "in formal response to the consultation, ",
        "with due respect to all parties and to the chair, ",
        "for the public record and the minutes of this meeting, ",
        "following careful study of the documents submitted, ",
        "to the honourable members of the council: ",
        "with reference to the published plans and regulations, ",
    ),
    "blunt": (
        "look, enough of this hot air, ",
        "frankly, I am sick of this nonsense, and ",
        "come on, wake up, ",
        "bluntly, and I do not care who hates it, ",
        "no more waffle, ",
        "for crying out loud, ",
    ),
}

POSITIONS: dict[tuple[str, str], tuple[str, ...]] = {
    ("for", "firm"): (
        "I am firmly in favour of {doing}",
        "without any doubt, I say yes to {thing}",
        "I am certain that {town} must {do}",
        "there can be no doubt that {town} should {do}",
        "nothing will change my mind, and I fully support {thing}",
        "it is absolutely right to {do}",
    ),
    ("for", "even"): (
        "I am in favour of {doing}",
        "I support {thing}",
        "{town} should {do}",
        "I will vote yes to {thing}",
        "I think it is right to {do}",
        "I would like {town} to {do}",
    ),
    ("for", "hedged"): (
        "I may be wrong, but I lean towards {doing}",
        "I suppose, with some doubts, that I would say yes to {thing}",
        "as far as I can tell, it may be right to {do}",
        "perhaps {town} should {do}",
        "if I had to choose today, I would probably support {thing}",
        "it seems to me that {thing} might be a good idea",
    ),
    ("against", "firm"): (
        "I am firmly against {doing}",
        "without any doubt, I say no to {thing}",
        "I am certain that {town} must never {do}",
        "there can be no doubt that it is wrong to {do}",
        "nothing will change my mind, and I utterly oppose {thing}",
        "it is absolutely wrong to {do}",
    ),
    ("against", "even"): (
        "I am against {doing}",
        "I oppose {thing}",
        "{town} should not {do}",
        "I will vote no to {thing}",
        "I think it is a mistake to {do}",
        "I would not like {town} to {do}",
    ),
    ("against", "hedged"): (
        "I may be wrong, but I lean against {doing}",
        "I suppose, with some doubts, that I would say no to {thing}",
        "as far as I can tell, it may be a mistake to {do}",
        "perhaps {town} should not {do}",
        "if I had to choose today, I would probably oppose {thing}",
        "it seems to me that {thing} might be a bad idea",
    ),
    ("compromise", "firm"): (
        "the only sensible middle way is to {middle}",
        "I am certain that we should meet in the middle and {middle}",
        "neither a plain yes nor a plain no will do, and {town} must {middle}",
        "there can be no doubt that a compromise is best, so let us {middle}",
        "both sides must give way, and {town} should {middle}",
    ),
    ("compromise", "even"): (
        "I would meet both sides halfway and {middle}",
        "instead of a yes or a no, {town} should {middle}",
        "a good compromise would be to {middle}",
        "my middle way would be to {middle}",
        "both sides could live with it if we {middle}",
    ),
    ("compromise", "hedged"): (
        "perhaps there is a middle way, and {town} could {middle}",
        "I am not sure, but it might be enough to {middle}",
        "a compromise may be possible if we {middle}",
        "I wonder whether both sides could live with it if we {middle}",
        "if I see it rightly, we could try to meet halfway and {middle}",
    ),
    ("undecided", "firm"): (
        "I certainly will not decide about {thing} yet",
        "I refuse to take a side on {thing} before we know {unknown}",
        "I am certain that nobody can give an answer on {thing} yet",
        "I will not vote on {thing} until somebody tells us {unknown}",
    ),
    ("undecided", "even"): (
        "I have not made up my mind about {thing}",
        "I am undecided about {doing}",
        "I can see both sides of {thing} and cannot choose between them",
        "I do not have an answer on {thing} yet",
    ),
    ("undecided", "hedged"): (
        "I am not at all sure what to think about {thing}",
        "I may be missing something, but I cannot decide about {doing}",
        "I do not quite know whether {thing} might help or not",
        "perhaps I am too slow for this, but I am still unsure about {doing}",
    ),
}


# Degree of certainty, repeated in longer answers.
ASSURANCES = {
    "firm": (
        "I would swear to every word of this",
        "I am one hundred percent convinced",
        "I say so with absolute certainty",
        "nobody will ever move me an inch on this",
        "my mind is made up, once and for all",
    ),
    "even": (),
    "hedged": (
        "I may well be wrong about all of this",
        "I am only guessing, and I have been mistaken before",
        "somebody who knows more than I do may correct me",
        "please take this with a pinch of salt, as I am no expert",
        "that is only my humble impression, and a tentative one",
    ),
}

# The same for people who are firmly undecided.
FIRM_DOUBTS = (
    "nobody will ever hurry me into an answer",
    "I say that with absolute certainty",
    "on that I am one hundred percent clear",
    "I would swear that nobody here knows better",
)


NEXT_STEPS = {
    "for": (
        "I would begin this spring and report back to the town hall after a year",
        "the first step could be taken within a month, and the rest can follow",
        "once it is running, I think we will wonder why we waited so long",
    ),
    "against": (
        "I would leave things as they are and look at the real problem first",
        "there are three older promises in the drawer, and they should come first",
        "a year from now we would be sorry, so I would let the matter rest",
    ),
    "compromise": (
        "after a year we could sit down again and see which side was right",
        "let one person from each camp watch over it and report together",
        "if it works, we can go further, and if it does not, little is lost",
    ),
    "undecided": (
        "I would ask for a short report, written so that everyone can read it",
        "an open evening with people who know the matter would help me more than a vote",
        "give me a month, a walk around {place} and some honest answers",
    ),
}

OPENERS = {
    "warm": (
        "thank you all for caring so much about {town}",
        "how lovely to see so many of you here",
        "I am grateful to everyone who has worked on this",
        "it does my heart good that we can talk about such things",
        "what a joy to live in a place where people listen to each other",
        "I baked a cake for this evening, so please help yourselves",
    ),
    "plain": (),
    "formal": (
        "I wish to submit the following statement on the above matter",
        "I have examined the documents that the council has made available",
        "the undersigned respectfully offers the following remarks",
        "I thank the chair for the opportunity to comment",
        "this submission is made in accordance with the rules of the consultation",
        "permit me to state my position for the attention of the committee",
    ),
    "blunt": (
        "let me save us all some time",
        "I have heard enough excuses",
        "somebody has to say it",
        "this debate is going round in circles",
        "I will say it straight, since nobody else does",
        "half of what was said tonight is hot air",
    ),
}

CLOSERS = {
    "warm": (
        "whatever we decide, we will still be neighbours in the morning",
        "I hug everyone who sees it differently, and the coffee is on me",
        "with warm wishes to all of you and to those at home",
        "thank you for listening so kindly",
        "it is a gift to have neighbours like you",
        "take care of each other on the way home",
    ),
    "plain": (),
    "formal": (
        "I remain grateful for the council's consideration",
        "I respectfully ask that this statement be entered in the minutes",
        "the council may be assured of my continued cooperation",
        "I submit these remarks for due deliberation",
        "a written copy of this statement has been filed with the clerk",
    ),
    "blunt": (
        "that is all there is to it",
        "end of story",
        "anything else is nonsense",
        "if that hurts somebody's feelings, so be it",
        "I am not going to say it twice",
    ),
}

LIST_TITLES = {
    "for": ("why I would say yes:", "what speaks for it:", "my reasons:"),
    "against": ("why I would say no:", "what speaks against it:", "my reasons:"),
    "compromise": ("what both sides have right:", "why a middle way is better:", "what I hear from both sides:"),
    "undecided": ("what pulls me both ways:", "what I am weighing up:", "what I hear from both sides:"),
}

CALLS = {
    "for": (
        "please vote yes on {day}!",
        "sign the petition for it at the town hall before {day}!",
        "come to the hearing on {day} and speak up for it!",
        "write to your councillor today and ask for a yes!",
    ),
    "against": (
        "please vote no on {day}!",
        "sign the petition against it at the town hall before {day}!",
        "come to the hearing on {day} and speak up against it!",
        "write to your councillor today and ask for a no!",
    ),
    "compromise": (
        "come to the hearing on {day} and ask for the middle way!",
        "bring somebody from the other side along on {day} and sign together!",
        "write to your councillor today and ask for a compromise!",
        "please put your name under the joint proposal before {day}!",
    ),
    "undecided": (
        "come to the hearing on {day} and listen!",
        "please send your own questions to the council before {day}!",
        "go and have a look for yourself before {day}!",
        "ask your councillor today for a clear answer!",
    ),
}

ASKED_BACK = (
    "has anybody worked out {asked}?",
    "could somebody tell me {asked}?",
    "does the council know {asked}?",
    "what would you do in our place?",
    "what would have to happen for you to change your mind?",
    "how do the rest of you see it?",
)


QUESTIONS = (
    "Should {town} {do}?",
    "{town} is thinking about {doing}. What do you say?",
    "The council of {town} proposes to {do}. Is that right?",
    "A petition asks {town} to {do}. Should the council agree?",
    "On {day} we vote on whether {town} should {do}. How should we vote?",
    "Would it be a good thing for {town} to {do}?",
    "What would you tell a neighbour who asks whether {town} should {do}?",
    "Tell the {town} town hall what you think about {thing}.",
    "There are plans in {town} for {doing}. Are you for or against?",
    "Some people in {town} want to {do}, and others do not. What is your view?",
    "The town hall in {town} is full tonight because of {thing}. What would you say at the microphone?",
    "Please give the {town} council your opinion. Should it {do}?",
)
